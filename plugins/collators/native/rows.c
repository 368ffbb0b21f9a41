/* Dense rows, written in one pass: what comes before a piece, the piece, and so on to the end, every field of it at once. */
#include "rows.h"

#include <string.h>

#include "arrays.h"

typedef enum { COPIED, ONES, COUNTED } Content;

typedef struct {
    Array out;    /* int64 or float32, flat over all rows */
    Array source; /* where content is COPIED */
    Content content;
    int64_t fill; /* of int64 outputs; float32 is filled with 0 */
} Field;

typedef struct {
    int64_t *starts, *lengths, *places;
    size_t count;
} Pieces;

static void fill_between(const Field *field, size_t from, size_t to) {
    if (field->out.kind == FLOAT32) {
        memset(field->out.data + from * 4, 0, (to - from) * 4);
    } else if (field->fill == 0) {
        memset(field->out.data + from * 8, 0, (to - from) * 8);
    } else {
        int64_t *out = (int64_t *)field->out.data;
        for (size_t place = from; place < to; place++) out[place] = field->fill;
    }
}

static void write_piece(const Field *field, size_t place, size_t start, size_t length) {
    const char *source = field->source.data;
    if (field->out.kind == FLOAT32) {
        float *out = (float *)field->out.data + place;
        if (field->source.kind == FLOAT32) {
            memcpy(out, source + start * 4, length * 4); /* bits, not values: NaN keeps its payload */
        } else {
            const uint8_t *bytes = (const uint8_t *)source + start;
            for (size_t i = 0; i < length; i++) out[i] = (float)bytes[i];
        }
        return;
    }
    int64_t *out = (int64_t *)field->out.data + place;
    if (field->content == ONES) {
        for (size_t i = 0; i < length; i++) out[i] = 1;
    } else if (field->content == COUNTED) {
        for (size_t i = 0; i < length; i++) out[i] = (int64_t)i;
    } else if (field->source.kind == INT64) {
        memcpy(out, source + start * 8, length * 8);
    } else {
        source += start * 4;
        for (size_t i = 0; i < length; i++) {
            int32_t value;
            memcpy(&value, source + i * 4, 4); /* Arrow's memory may have any address */
            out[i] = value;
        }
    }
}

static void write_all(const Field *fields, size_t field_count, const Pieces *pieces, size_t total) {
    size_t written = 0;
    for (size_t i = 0; i < pieces->count; i++) {
        size_t place = (size_t)pieces->places[i], length = (size_t)pieces->lengths[i];
        if (length == 0) continue;
        for (size_t f = 0; f < field_count; f++) {
            if (place > written) fill_between(&fields[f], written, place);
            write_piece(&fields[f], place, (size_t)pieces->starts[i], length);
        }
        written = place + length;
    }
    for (size_t f = 0; f < field_count && total > written; f++) fill_between(&fields[f], written, total);
}

/* Nothing is written unless all of it fits: pieces ascend, do not overlap, and lie inside the outputs and inside every source. */
static int pieces_fit(const Pieces *pieces, size_t total, size_t available) {
    uint64_t written = 0;
    for (size_t i = 0; i < pieces->count; i++) {
        int64_t start = pieces->starts[i], length = pieces->lengths[i], place = pieces->places[i];
        if (start < 0 || length < 0 || place < 0) {
            PyErr_Format(PyExc_ValueError, "piece %zu has a negative start, length or place", i);
            return 0;
        }
        if ((uint64_t)place < written) {
            PyErr_Format(PyExc_ValueError, "piece %zu begins before the one in front of it ends", i);
            return 0;
        }
        if ((uint64_t)place > total || (uint64_t)length > total - (uint64_t)place) {
            PyErr_Format(PyExc_ValueError, "piece %zu of %lld elements at %lld reaches beyond the %zu of the output", i,
                         (long long)length, (long long)place, total);
            return 0;
        }
        if ((uint64_t)start > available || (uint64_t)length > available - (uint64_t)start) {
            PyErr_Format(PyExc_ValueError, "piece %zu of %lld elements from %lld reaches beyond the %zu of its source", i,
                         (long long)length, (long long)start, available);
            return 0;
        }
        written = (uint64_t)place + (uint64_t)length;
    }
    return 1;
}

static int fields_are_apart(const Field *fields, size_t count) {
    for (size_t i = 0; i < count; i++) {
        for (size_t j = 0; j < count; j++) {
            if ((i < j && arrays_overlap(&fields[i].out, &fields[j].out)) ||
                (fields[j].content == COPIED && arrays_overlap(&fields[i].out, &fields[j].source))) {
                PyErr_Format(PyExc_ValueError, "output %zu shares memory with field %zu", i, j);
                return 0;
            }
        }
    }
    return 1;
}

/* `description`: (output, fill, source), the source an array, "ones" or "counted". */
static int field_open(Field *field, PyObject *description) {
    PyObject *out, *source;
    long long fill;
    if (!PyArg_ParseTuple(description, "OLO;a field is (output, fill, source)", &out, &fill, &source)) return 0;
    field->fill = fill;
    if (!array_open(&field->out, out, 1, "an output")) return 0;
    if (field->out.kind != INT64 && field->out.kind != FLOAT32) {
        PyErr_SetString(PyExc_TypeError, "an output is neither int64 nor float32");
        return 0;
    }
    if (field->out.kind == FLOAT32 && fill != 0) {
        PyErr_SetString(PyExc_ValueError, "float32 outputs are filled with 0");
        return 0;
    }
    if (PyUnicode_Check(source)) {
        if (PyUnicode_CompareWithASCIIString(source, "ones") == 0) {
            field->content = ONES;
        } else if (PyUnicode_CompareWithASCIIString(source, "counted") == 0) {
            field->content = COUNTED;
        } else {
            PyErr_SetString(PyExc_ValueError, "a source is an array, 'ones' or 'counted'");
            return 0;
        }
        if (field->out.kind != INT64) {
            PyErr_SetString(PyExc_TypeError, "ones and counts are int64");
            return 0;
        }
        return 1;
    }
    field->content = COPIED;
    if (!array_open(&field->source, source, 0, "a source")) return 0;
    int whole = field->source.kind == INT64 || field->source.kind == INT32;
    if (whole != (field->out.kind == INT64)) {
        PyErr_SetString(PyExc_TypeError, "int64 outputs take int64 or int32, float32 outputs take float32 or uint8");
        return 0;
    }
    return 1;
}

const char write_rows_doc[] =
    "write_rows(fields, starts, lengths, places)\n--\n\n"
    "Write n pieces into every field, and its fill elsewhere: out[places[i] : places[i] + lengths[i]] =\n"
    "source[starts[i] : starts[i] + lengths[i]]. `fields` is a tuple of (out, fill, source): out int64 or float32, all with equally many\n"
    "elements; source an array (int64 or int32, float32 or uint8), 'ones' or 'counted' (0, 1, ... in every piece). starts, lengths, places\n"
    "int64[n], places ascending. Raises TypeError or ValueError before anything is written.";

PyObject *write_rows(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *descriptions, *starts, *lengths, *places, *result = NULL;
    if (!PyArg_ParseTuple(arguments, "OOOO:write_rows", &descriptions, &starts, &lengths, &places)) return NULL;
    if (!PyTuple_Check(descriptions)) {
        PyErr_SetString(PyExc_TypeError, "fields must be a tuple");
        return NULL;
    }
    size_t field_count = (size_t)PyTuple_Size(descriptions), total = 0, available = SIZE_MAX;
    Pieces pieces = {NULL, NULL, NULL, SIZE_MAX};
    Field *fields = PyMem_Calloc(field_count + 1, sizeof *fields);
    if (fields == NULL) return PyErr_NoMemory();
    if ((pieces.starts = indices_copied(starts, &pieces.count, "starts")) == NULL) goto done;
    if ((pieces.lengths = indices_copied(lengths, &pieces.count, "lengths")) == NULL) goto done;
    if ((pieces.places = indices_copied(places, &pieces.count, "places")) == NULL) goto done;
    for (size_t f = 0; f < field_count; f++) {
        if (!field_open(&fields[f], PyTuple_GetItem(descriptions, (Py_ssize_t)f))) goto done;
        if (f > 0 && fields[f].out.count != total) {
            PyErr_Format(PyExc_ValueError, "output %zu has %zu elements, the ones before it %zu", f, fields[f].out.count, total);
            goto done;
        }
        total = fields[f].out.count;
        if (fields[f].content == COPIED && fields[f].source.count < available) available = fields[f].source.count;
    }
    if (field_count > 0) {
        if (!pieces_fit(&pieces, total, available) || !fields_are_apart(fields, field_count)) goto done;
        Py_BEGIN_ALLOW_THREADS
        write_all(fields, field_count, &pieces, total);
        Py_END_ALLOW_THREADS
    }
    result = Py_NewRef(Py_None);
done:
    for (size_t f = 0; f < field_count; f++) {
        array_close(&fields[f].out);
        array_close(&fields[f].source);
    }
    PyMem_Free(fields);
    PyMem_Free(pieces.starts);
    PyMem_Free(pieces.lengths);
    PyMem_Free(pieces.places);
    return result;
}
