"""The demo's chat prompts: the same kind of work at very different lengths, from a few tokens to
some six hundred, because the padding of such a batch is what a padded KV cache pays for.

Contract: `CHATS` is a list of chats, each a list of messages for `apply_chat_template`.
"""

HARBOUR_REPORT = """\
Report of the harbour office on the storm of the second week of March.

The first warning reached us on Monday at six in the morning. The weather service expected wind of
force nine from the north-west by the evening, with a spring tide a little before midnight. We called
the captains of the eleven fishing boats that lay at the outer quay and asked them to move behind the
inner lock. Eight of them moved before noon. Two had engines open for repair and were towed in by the
pilot boat during the afternoon. The last one, the Petrel, was still at sea with a full net and came in
at half past four, when the waves already broke over the end of the northern pier.

At seven in the evening we closed the road along the sea wall. The school bus had made its last round,
and only one family had to be driven home by the fire brigade. At nine the power failed in the lower
town. The pumps of the lock run from the same line, so we started the diesel generator that had been
serviced in January. It ran without a fault for fourteen hours and used one hundred and ninety litres
of fuel. The hospital and the dairy have generators of their own and reported no trouble.

The water rose to four metres and ten centimetres above the chart, which is thirty centimetres below
the top of the wall and the highest level since the wall was raised. Some water came through the drain
in Mill Street, because the flap at its mouth was held open by a branch. Volunteers built a dam of
sandbags in front of the bakery and the library within half an hour. The cellar of the library stayed
dry. The bakery lost eleven sacks of flour but could bake again on Wednesday.

Nobody was hurt. The damage that we know of so far is this: the lamp at the end of the northern pier is
gone, about forty metres of railing are bent, the ice store of the fishing cooperative lost part of its
roof, and the small slipway at the sailing club is covered with gravel. The divers will look at the foot
of the pier as soon as the water is clear enough, which will hardly be before next week.

We ask the council for three things. The pumps of the lock should get a second power line, so that they
no longer depend on the lower town. The flap in Mill Street should be checked before every spring tide,
and not only in autumn. And the captains should be able to reach the office by radio at night: on Monday
they had to use the telephone of the pilot station, and for twenty minutes it was busy."""

RECIPE = """\
Take five hundred grams of flour, three hundred grams of warm water, ten grams of salt and a small spoon
of dry yeast. Mix everything in a bowl until no dry flour is left, cover the bowl and let it stand for
half an hour. Then fold the dough four times, turning the bowl a little after each fold, and repeat this
twice with twenty minutes in between. Leave the dough in a cool place over night. In the morning shape a
round loaf, let it rise for an hour while the oven heats to two hundred and forty degrees, cut the top
with a sharp knife and bake the loaf for forty minutes, the first half under a lid."""


def _chat(question: str, system: str = "You are a helpful assistant.") -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


CHATS = [
    _chat("Hello!", system="Be kind."),
    _chat("What is the capital of France?"),
    _chat(
        "My train leaves at ten past nine, the walk to the station takes twenty-five minutes and I want "
        "to buy a coffee on the way. When should I leave the house, and why?"
    ),
    _chat(f"Here is a recipe.\n\n{RECIPE}\n\nWhich tools does the baker need? Answer with a short list."),
    _chat(f"{HARBOUR_REPORT}\n\nSummarise this report in two sentences."),
    _chat("Write one line of a poem about the sea."),
]
