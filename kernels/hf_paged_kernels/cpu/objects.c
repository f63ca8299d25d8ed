/* Whether tensors and dicts are still what they were, for a call or two into Python each.
 *
 * Contract: this library knows neither Python nor torch. The caller hands in functions of Python's interface, holds
 * Python's lock, and keeps every object alive that a snapshot names.
 */
#include <stddef.h>

#include "entry.h"
#include "paged.h"

typedef void *Object;

/* Everything has 8 bytes; objects.py fills it in. */
typedef struct {
    int64_t get;      /* of the descriptor's type: Object (Object descriptor, Object self, Object type) */
    int64_t begins;   /* what a tensor's method data_ptr is in C: Object (Object self, Object without arguments) */
    int64_t number;   /* PyLong_AsLongLong */
    int64_t occurred; /* PyErr_Occurred */
    int64_t release;  /* Py_DecRef */
    int64_t next;     /* PyDict_Next */
    int64_t version;  /* the descriptor of a tensor's version */
    int64_t num_versioned, versioned, versions; /* tensors, and the sum of their versions */
    int64_t num_pointed, pointed, addresses;    /* tensors, and where the memory of each begins */
    int64_t num_dicts, dicts, sizes, entries;   /* dicts, how many entries each has, and all keys and values in turn */
} Snapshot;

typedef Object (*Get)(Object, Object, Object);
typedef Object (*Begins)(Object, Object);
typedef long long (*Number)(Object);
typedef Object (*Occurred)(void);
typedef void (*Release)(Object);
typedef int (*Next)(Object, ptrdiff_t *, Object *, Object *);

#define AS(type, field) ((type)(intptr_t)(field))

/* The value of an integer that was made for this, which goes; 0 where none was made, or something else. */
static int take(const Snapshot *now, Object made, int64_t *value) {
    if (made == NULL) return 0;
    *value = AS(Number, now->number)(made);
    AS(Release, now->release)(made);
    return *value != -1 || AS(Occurred, now->occurred)() == NULL;
}

/* 1 where all is as it was, 0 where something is not, -1 where Python raised an exception. */
EXPORT int hf_paged_holds(const Snapshot *now) {
    Object *const versioned = AS(Object *, now->versioned), *const pointed = AS(Object *, now->pointed);
    int64_t value, sum = 0; /* a version only rises, so that their sum tells as much as each of them */
    for (int64_t i = 0; i < now->num_versioned; i++) {
        if (!take(now, AS(Get, now->get)(AS(Object, now->version), versioned[i], NULL), &value)) return -1;
        sum += value;
    }
    if (sum != now->versions) return 0;
    for (int64_t i = 0; i < now->num_pointed; i++) {
        if (!take(now, AS(Begins, now->begins)(pointed[i], NULL), &value)) return -1;
        if (value != AS(int64_t *, now->addresses)[i]) return 0;
    }
    const Object *entry = AS(Object *, now->entries);
    for (int64_t i = 0; i < now->num_dicts; i++) {
        const Object dict = AS(Object *, now->dicts)[i];
        int64_t left = AS(int64_t *, now->sizes)[i];
        ptrdiff_t position = 0;
        Object key, item;
        for (; AS(Next, now->next)(dict, &position, &key, &item); entry += 2, left--)
            if (left == 0 || key != entry[0] || item != entry[1]) return 0;
        if (left) return 0;
    }
    return 1;
}
