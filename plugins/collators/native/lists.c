/* Lists of Python numbers to one flat array. The numbers lie scattered over the heap, so much of the time would go into waiting for memory:
   a block of them is asked for while the block before it is converted. */
#include "lists.h"

#include <math.h>

#if defined(__GNUC__)
#define ASK_FOR(address) __builtin_prefetch(address)
#define ASK_EARLY_FOR(address) __builtin_prefetch(address, 0, 2) /* not into the first cache, which would lose it again */
#define INLINED static inline __attribute__((always_inline)) /* one loop per kind of output, without a branch on the kind in it */
#else
#define ASK_FOR(address) ((void)(address))
#define ASK_EARLY_FOR(address) ((void)(address))
#define INLINED static inline
#endif

#define BLOCK 256
#define NEAR 32       /* numbers between the last request for one and its conversion */
#define REAL_BLOCK 64 /* of floats, which are asked for once: they are often as new as their list, and then lie in order */
#define ROWS_AHEAD 8 /* lists that are asked for before their length is read */

/* What is read: row i of `row_count` has lengths[i] numbers. */
typedef struct {
    PyObject *list;
    const int64_t *lengths;
    size_t row_count;
} Rows;

/* Exact types only: their conversion runs no Python code, so no list changes meanwhile and nothing borrowed vanishes. */
INLINED int is_whole(PyObject *item) { return PyLong_CheckExact(item) || Py_IS_TYPE(item, &PyBool_Type); }

INLINED int read_whole(PyObject *item, int64_t *value) {
    if (!is_whole(item)) return 0;
    *value = sizeof(Py_ssize_t) == sizeof *value ? PyLong_AsSsize_t(item) : PyLong_AsLongLong(item); /* the quicker of the two */
    return *value != -1 || !PyErr_Occurred();
}

INLINED int read_real(PyObject *item, double *value) {
    if (PyFloat_CheckExact(item)) {
        *value = PyFloat_AsDouble(item);
        return 1;
    }
    if (!is_whole(item)) return 0;
    *value = PyLong_AsDouble(item);
    return *value != -1.0 || !PyErr_Occurred();
}

INLINED int read_one(PyObject *item, Kind kind, char *out, size_t place) {
    int64_t whole;
    double real;
    switch (kind) {
    case INT64:
        return read_whole(item, (int64_t *)out + place);
    case INT32:
        if (!read_whole(item, &whole) || whole < INT32_MIN || whole > INT32_MAX) return 0;
        ((int32_t *)out)[place] = (int32_t)whole;
        return 1;
    case FLOAT32:
        if (!read_real(item, &real)) return 0;
        ((float *)out)[place] = (float)real;
        return 1;
    default:
        if (!read_real(item, &real) || (real != 0.0 && real != 1.0) || signbit(real)) return 0;
        ((uint8_t *)out)[place] = (uint8_t)real;
        return 1;
    }
}

/* A row, or NULL where it is no list of its stated length or longer than what is `left` of the output. */
static PyObject *row_at(const Rows *rows, size_t number, size_t left) {
    PyObject *row = PyList_GetItem(rows->list, (Py_ssize_t)number);
    if (number + ROWS_AHEAD < rows->row_count) ASK_FOR(PyList_GetItem(rows->list, (Py_ssize_t)(number + ROWS_AHEAD)));
    if (row == NULL || !PyList_CheckExact(row) || (int64_t)PyList_Size(row) != rows->lengths[number]) return NULL;
    return (size_t)rows->lengths[number] <= left ? row : NULL;
}

/* The numbers of all rows, one after the other, borrowed: the last 2 * BLOCK of them that were taken. */
typedef struct {
    const Rows *rows;
    PyObject *row;
    size_t next_row, place, length; /* `place` in the row of `length` numbers */
    size_t taken;
    PyObject *ring[2 * BLOCK];
} Stream;

/* Take at most `block` numbers; returns how many, or -1 where a row does not fit. */
INLINED int take_block(Stream *stream, int block, int ask, size_t total) {
    int count = 0;
    while (count < block) {
        if (stream->place == stream->length) {
            if (stream->next_row == stream->rows->row_count) break;
            stream->row = row_at(stream->rows, stream->next_row, total - stream->taken);
            if (stream->row == NULL) return -1;
            stream->length = (size_t)stream->rows->lengths[stream->next_row++];
            stream->place = 0;
        }
        size_t left = stream->length - stream->place, room = (size_t)(block - count), run = left < room ? left : room;
        for (size_t i = 0; i < run; i++) {
            PyObject *item = PyList_GetItem(stream->row, (Py_ssize_t)(stream->place + i));
            stream->ring[(stream->taken + i) % (2 * BLOCK)] = item;
            if (ask) ASK_FOR(item);
        }
        stream->place += run;
        stream->taken += run;
        count += (int)run;
    }
    return count;
}

INLINED int read_numbers(const Rows *rows, Kind kind, const Array *out) {
    Stream stream = {.rows = rows};
    size_t done = 0;
    int real = kind == FLOAT32, block;
    do {
        size_t before = stream.taken;
        block = take_block(&stream, real ? REAL_BLOCK : BLOCK, real, out->count);
        if (block < 0) return 0;
        for (int i = 0; !real && i < block; i += 2) ASK_EARLY_FOR(stream.ring[(before + (size_t)i) % (2 * BLOCK)]); /* neighbours share a line */
        for (; done < before; done++) {
            if (!real) ASK_FOR(stream.ring[(done + NEAR) % (2 * BLOCK)]);
            if (!read_one(stream.ring[done % (2 * BLOCK)], kind, out->data, done)) return 0;
        }
    } while (block > 0);
    return done == out->count;
}

/* Masks mostly consist of the interpreter's own 0 and 1. Those are known by their address and not looked into, without a branch, since
   nobody can predict which of the two it is. A row that holds anything else is read again. */
static int read_masks(const Rows *rows, const Array *out) {
    PyObject *zero = PyLong_FromLong(0), *one = PyLong_FromLong(1);
    uint8_t *values = (uint8_t *)out->data, *end = values + out->count;
    int complete = 1;
    for (size_t number = 0; complete && number < rows->row_count; number++) {
        PyObject *row = row_at(rows, number, (size_t)(end - values));
        Py_ssize_t length = row == NULL ? 0 : (Py_ssize_t)rows->lengths[number];
        int others = 0;
        for (Py_ssize_t i = 0; i < length; i++) {
            PyObject *item = PyList_GetItem(row, i);
            values[i] = item == one;
            others |= (item != zero) & (item != one);
        }
        complete = row != NULL;
        for (Py_ssize_t i = 0; others && complete && i < length; i++) {
            complete = read_one(PyList_GetItem(row, i), UINT8, (char *)values, (size_t)i);
        }
        values += length;
    }
    Py_XDECREF(zero);
    Py_XDECREF(one);
    return complete && values == end;
}

static int read_all(const Rows *rows, const Array *out) {
    switch (out->kind) {
    case INT64:
        return read_numbers(rows, INT64, out);
    case INT32:
        return read_numbers(rows, INT32, out);
    case FLOAT32:
        return read_numbers(rows, FLOAT32, out);
    default:
        return read_masks(rows, out);
    }
}

const char measure_lists_doc[] =
    "measure_lists(rows, lengths)\n--\n\n"
    "Write how many items each row has into lengths (int64[n]) and return True; `rows` is a list of n lists. Returns False, and leaves anything\n"
    "in `lengths`, where a row is no list itself. Raises TypeError or ValueError for arrays that cannot be used.";

PyObject *measure_lists(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *list, *target, *result = NULL;
    Array lengths = {0};
    if (!PyArg_ParseTuple(arguments, "O!O:measure_lists", &PyList_Type, &list, &target)) return NULL;
    if (!array_open_as(&lengths, target, 1, INT64, "lengths")) return NULL;
    size_t row_count = (size_t)PyList_Size(list);
    if (lengths.count != row_count) {
        PyErr_Format(PyExc_ValueError, "lengths has %zu entries, not %zu", lengths.count, row_count);
    } else {
        int lists = 1;
        for (size_t number = 0; lists && number < row_count; number++) {
            PyObject *row = PyList_GetItem(list, (Py_ssize_t)number);
            if (number + ROWS_AHEAD < row_count) ASK_FOR(PyList_GetItem(list, (Py_ssize_t)(number + ROWS_AHEAD)));
            lists = PyList_CheckExact(row);
            if (lists) ((int64_t *)lengths.data)[number] = PyList_Size(row);
        }
        result = PyBool_FromLong(lists);
    }
    array_close(&lengths);
    return result;
}

const char read_lists_doc[] =
    "read_lists(rows, lengths, out)\n--\n\n"
    "Read the numbers of all rows into the flat `out` and return True. `rows` is a list of n lists that have lengths[i] (int64[n]) numbers;\n"
    "out takes whole numbers as int64 or int32, any as float32, 0 and 1 as uint8. Returns False, and leaves anything in `out`, where a row is\n"
    "no list of that length, or something in it is no int, bool or float itself (but a subclass, an array scalar, ...) or does not fit.\n"
    "Raises TypeError or ValueError for arrays that cannot be used.";

PyObject *read_lists(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *list, *lengths, *target, *result = NULL;
    Array out = {0};
    if (!PyArg_ParseTuple(arguments, "O!OO:read_lists", &PyList_Type, &list, &lengths, &target)) return NULL;
    size_t row_count = (size_t)PyList_Size(list);
    int64_t *copied = indices_copied(lengths, &row_count, "lengths");
    if (copied == NULL) return NULL;
    if (array_open(&out, target, 1, "out")) {
        const Rows rows = {list, copied, row_count};
        int complete = read_all(&rows, &out);
        PyErr_Clear(); /* of a number that does not fit */
        result = PyBool_FromLong(complete);
        array_close(&out);
    }
    PyMem_Free(copied);
    return result;
}
