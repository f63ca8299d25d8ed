"""Reads the plots that benches write."""

import re
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"


def numbers_of(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", text)]


def check_plot(text: str, labels: list[str], panels: int) -> list[str]:
    """Fail unless a plot has so many panels, these axis labels, and all that it draws inside; return its words."""
    root = ElementTree.fromstring(text)
    _, _, width, height = numbers_of(root.get("viewBox"))
    groups = root.findall(f"{SVG}g")
    assert len(groups) == panels, f"{len(groups)} panels"
    for group in groups:
        left, top = numbers_of(group.get("transform"))
        assert any(group.findall(f".//{SVG}{shape}") for shape in ("polyline", "rect", "circle")), "nothing is drawn"
        places = []
        for line in group.iter(f"{SVG}polyline"):
            values = numbers_of(line.get("points"))
            places += zip(values[::2], values[1::2], strict=True)
        places += [(float(dot.get("cx")), float(dot.get("cy"))) for dot in group.iter(f"{SVG}circle")]
        for bar in group.iter(f"{SVG}rect"):
            x, y, w, h = (float(bar.get(name)) for name in ("x", "y", "width", "height"))
            assert w > 0 and h >= 0
            places += [(x, y), (x + w, y + h)]
        for word in group.iter(f"{SVG}text"):
            if word.get("x"):
                places.append((float(word.get("x")), float(word.get("y"))))
        outside = [(x, y) for x, y in places if not (0 <= left + x <= width and 0 <= top + y <= height)]
        assert not outside, outside
        turned = [word for word in group.iter(f"{SVG}text") if "rotate(-90 " in (word.get("transform") or "")]
        assert len(turned) == 1 and turned[0].text, "no name of the y axis"
    words = [word.text for word in root.iter(f"{SVG}text")]
    missing = [label for label in labels if label not in words]
    assert not missing, f"no label {missing} among {words}"
    return words
