/* A padded micro-batch straight from the columns: the model's inputs, the gather index and the lengths in one call, each row in one pass. */
#include "padded.h"

#include <string.h>

/* One sample as it was when it was checked: no other thread changes it while the rows are written. */
typedef struct {
    size_t first, tokens, actions; /* its tokens begin at `first` of the columns */
    size_t row;
} Sample;

typedef struct {
    Sample *entries;
    size_t count, scored;
} Samples;

static int64_t entry(const Array *array, size_t place) {
    int64_t value;
    memcpy(&value, array->data + place * sizeof value, sizeof value); /* inputs may have any address */
    return value;
}

/* The begin and the length of segment `sample` of rising offsets that end at most at `total`. */
static int segment(const Array *offsets, int64_t sample, size_t total, const char *name, size_t *first, size_t *length) {
    int64_t start = entry(offsets, (size_t)sample), stop = entry(offsets, (size_t)sample + 1);
    if (start < 0 || stop < start || (uint64_t)stop > total) {
        PyErr_Format(PyExc_ValueError, "%s go from %lld to %lld of %zu at sample %lld", name, (long long)start, (long long)stop, total,
                     (long long)sample);
        return 0;
    }
    *first = (size_t)start;
    *length = (size_t)(stop - start);
    return 1;
}

/* Nothing predicts a sample's first token. */
static size_t scored_of(const Sample *sample) { return sample->actions - (sample->actions == sample->tokens); }

/* Copy what is needed of the chosen samples; `token_count` bounds their places. The caller frees `samples->entries` with PyMem_Free. */
static int samples_read(Samples *samples, PyObject *chosen, PyObject *token_offsets, PyObject *action_offsets, size_t token_count) {
    Array numbers = {0}, tokens = {0}, actions = {0};
    int complete = 0;
    samples->entries = NULL;
    if (!array_open_as(&numbers, chosen, 0, INT64, "samples")) goto done;
    if (!array_open_as(&tokens, token_offsets, 0, INT64, "token_offsets")) goto done;
    if (!array_open_as(&actions, action_offsets, 0, INT64, "action_offsets")) goto done;
    if (tokens.count != actions.count) {
        PyErr_Format(PyExc_ValueError, "action_offsets has %zu entries, not %zu", actions.count, tokens.count);
        goto done;
    }
    samples->count = numbers.count;
    samples->scored = 0;
    samples->entries = PyMem_Calloc(numbers.count + 1, sizeof *samples->entries);
    if (samples->entries == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (size_t i = 0; i < numbers.count; i++) {
        Sample *sample = &samples->entries[i];
        int64_t number = entry(&numbers, i);
        size_t unused;
        if (number < 0 || (uint64_t)number + 1 >= tokens.count) {
            PyErr_Format(PyExc_ValueError, "there is no sample %lld", (long long)number);
            goto done;
        }
        if (!segment(&tokens, number, token_count, "token_offsets", &sample->first, &sample->tokens)) goto done;
        if (!segment(&actions, number, INT64_MAX, "action_offsets", &unused, &sample->actions)) goto done;
        if (sample->tokens == 0 || sample->actions > sample->tokens) {
            PyErr_Format(PyExc_ValueError, "sample %lld has %zu response tokens of %zu", (long long)number, sample->actions,
                         sample->tokens);
            goto done;
        }
        samples->scored += scored_of(sample);
    }
    complete = 1;
done:
    array_close(&numbers);
    array_close(&tokens);
    array_close(&actions);
    return complete;
}

/* One micro-batch: its rows and widths, and which of the samples it has. */
typedef struct {
    size_t rows, width, action_width;
    size_t first_sample, sample_count, scored;
} MicroBatch;

/* Put the samples from `micro_batch->first_sample` on into its rows, at most one in each. */
static int rows_assigned(MicroBatch *micro_batch, const Samples *samples, const int64_t *row_offsets) {
    size_t rows = micro_batch->rows, left = samples->count - micro_batch->first_sample;
    if (row_offsets[0] != 0) {
        PyErr_Format(PyExc_ValueError, "row_offsets begin with %lld, not with 0", (long long)row_offsets[0]);
        return 0;
    }
    for (size_t row = 0; row < rows; row++) {
        int64_t first = row_offsets[row], next = row_offsets[row + 1];
        if ((next != first && next != first + 1) || (uint64_t)next > left) {
            PyErr_Format(PyExc_ValueError, "row %zu begins at sample %lld, the row behind it at %lld of %zu", row, (long long)first,
                         (long long)next, left);
            return 0;
        }
        if (next == first) continue;
        Sample *placed = &samples->entries[micro_batch->first_sample + (size_t)first];
        if (placed->tokens > micro_batch->width || placed->actions > micro_batch->action_width) {
            PyErr_Format(PyExc_ValueError, "row %zu needs %zu tokens and %zu response tokens, it has %zu and %zu", row, placed->tokens,
                         placed->actions, micro_batch->width, micro_batch->action_width);
            return 0;
        }
        placed->row = row;
        micro_batch->scored += scored_of(placed);
    }
    micro_batch->sample_count = (size_t)row_offsets[rows];
    return 1;
}

/* Read (rows, width, action_width) of each micro-batch and give it its samples. The caller frees the result with PyMem_Free. */
static MicroBatch *micro_batches_read(PyObject *shapes, size_t count, const Samples *samples, const int64_t *row_offsets, size_t ends) {
    MicroBatch *micro_batches = PyMem_Calloc(count + 1, sizeof *micro_batches);
    if (micro_batches == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    size_t next_sample = 0, next_end = 0;
    for (size_t i = 0; i < count; i++) {
        Py_ssize_t rows, width, action_width;
        MicroBatch *micro_batch = &micro_batches[i];
        PyObject *shape = PyTuple_GetItem(shapes, (Py_ssize_t)i);
        if (!PyTuple_Check(shape)) {
            PyErr_SetString(PyExc_TypeError, "a shape is a tuple");
            goto refused;
        }
        if (!PyArg_ParseTuple(shape, "nnn;a shape is (rows, width, action_width)", &rows, &width,
                              &action_width)) {
            goto refused;
        }
        if (width < 0 || action_width < 0 || next_end >= ends || (size_t)rows > ends - next_end - 1) {
            PyErr_Format(PyExc_ValueError, "micro-batch %zu has %zd rows of %zd and %zd, and %zu offsets", i, rows, width, action_width,
                         ends - next_end);
            goto refused;
        }
        *micro_batch = (MicroBatch){(size_t)rows, (size_t)width, (size_t)action_width, next_sample, 0, 0};
        if (!rows_assigned(micro_batch, samples, row_offsets + next_end)) goto refused;
        next_sample += micro_batch->sample_count;
        next_end += (size_t)rows + 1;
    }
    if (next_sample == samples->count && next_end == ends) return micro_batches;
    PyErr_Format(PyExc_ValueError, "%zu of %zu samples and %zu of %zu row_offsets have a micro-batch", next_sample, samples->count,
                 next_end, ends);
refused:
    PyMem_Free(micro_batches);
    return NULL;
}

typedef struct {
    Array out, index, lengths, input_ids;
    const char *contents;
    int64_t pad;
} Target;

static int sizes_fit(const Target *target, const Samples *samples, const MicroBatch *micro_batches, size_t count) {
    size_t fields = strlen(target->contents), left = target->out.count;
    if (strspn(target->contents, "tmp") != fields) {
        PyErr_Format(PyExc_ValueError, "contents are of t, m and p, not '%s'", target->contents);
        return 0;
    }
    for (size_t i = 0; i < count && fields > 0; i++) {
        size_t rows = micro_batches[i].rows, width = micro_batches[i].width;
        if (rows > 0 && width > left / fields / rows) { /* without a product that could overflow */
            PyErr_Format(PyExc_ValueError, "out has %zu elements, too few for %zu fields of micro-batch %zu", target->out.count, fields, i);
            return 0;
        }
        left -= fields * rows * width;
    }
    if (left != 0) {
        PyErr_Format(PyExc_ValueError, "out has %zu elements too many", left);
        return 0;
    }
    if (target->index.count % 3 != 0 || target->index.count / 3 != samples->scored) {
        PyErr_Format(PyExc_ValueError, "index has %zu elements for %zu scored tokens", target->index.count, samples->scored);
        return 0;
    }
    if (target->lengths.count != samples->count) {
        PyErr_Format(PyExc_ValueError, "lengths has %zu entries, not %zu", target->lengths.count, samples->count);
        return 0;
    }
    if (arrays_overlap(&target->out, &target->index) || arrays_overlap(&target->out, &target->lengths) ||
        arrays_overlap(&target->index, &target->lengths) || arrays_overlap(&target->out, &target->input_ids) ||
        arrays_overlap(&target->index, &target->input_ids) || arrays_overlap(&target->lengths, &target->input_ids)) {
        PyErr_SetString(PyExc_ValueError, "the outputs share memory");
        return 0;
    }
    return 1;
}

static void fill(int64_t *out, size_t count, int64_t value) {
    for (size_t i = 0; i < count; i++) out[i] = value;
}

static void count_up(int64_t *out, size_t count, size_t first) {
    for (size_t i = 0; i < count; i++) out[i] = (int64_t)(first + i);
}

static void write_tokens(int64_t *out, const Array *input_ids, size_t first, size_t count) {
    if (input_ids->kind == INT64) {
        memcpy(out, input_ids->data + first * 8, count * 8);
        return;
    }
    const char *source = input_ids->data + first * 4;
    for (size_t i = 0; i < count; i++) {
        int32_t value;
        memcpy(&value, source + i * 4, 4);
        out[i] = value;
    }
}

/* `out` is the micro-batch's own part; `sample` NULL for an empty row. */
static void write_row(const Target *target, int64_t *out, const MicroBatch *micro_batch, size_t row, const Sample *sample) {
    size_t tokens = sample == NULL ? 0 : sample->tokens, gap = micro_batch->width - tokens;
    out += row * micro_batch->width;
    for (const char *content = target->contents; *content != '\0'; content++, out += micro_batch->rows * micro_batch->width) {
        fill(out, gap, *content == 't' ? target->pad : 0);
        if (tokens == 0) continue;
        if (*content == 't') {
            write_tokens(out + gap, &target->input_ids, sample->first, tokens);
        } else if (*content == 'm') {
            fill(out + gap, tokens, 1);
        } else {
            count_up(out + gap, tokens, 0);
        }
    }
}

static void write_all(const Target *target, const Samples *samples, const MicroBatch *micro_batches, size_t count) {
    int64_t *out = (int64_t *)target->out.data, *lengths = (int64_t *)target->lengths.data;
    int64_t *actions = (int64_t *)target->index.data, *rows = actions + samples->scored, *columns = rows + samples->scored;
    for (size_t m = 0; m < count; m++) {
        const MicroBatch *micro_batch = &micro_batches[m];
        size_t next_row = 0, before = 0; /* actions of the micro-batch's earlier samples */
        for (size_t i = 0; i < micro_batch->sample_count; i++) {
            const Sample *sample = &samples->entries[micro_batch->first_sample + i];
            size_t scored = scored_of(sample);
            for (; next_row < sample->row; next_row++) write_row(target, out, micro_batch, next_row, NULL);
            write_row(target, out, micro_batch, next_row++, sample);
            *lengths++ = (int64_t)sample->tokens;
            count_up(actions, scored, before + sample->actions - scored);
            fill(rows, scored, (int64_t)sample->row);
            count_up(columns, scored, micro_batch->width - scored - 1);
            actions += scored;
            rows += scored;
            columns += scored;
            before += sample->actions;
        }
        for (; next_row < micro_batch->rows; next_row++) write_row(target, out, micro_batch, next_row, NULL);
        out += strlen(target->contents) * micro_batch->rows * micro_batch->width;
    }
}

static PyObject *scored_counts(const MicroBatch *micro_batches, size_t count) {
    PyObject *counts = PyTuple_New((Py_ssize_t)count);
    for (size_t i = 0; counts != NULL && i < count; i++) {
        PyObject *scored = PyLong_FromSize_t(micro_batches[i].scored);
        if (scored == NULL || PyTuple_SetItem(counts, (Py_ssize_t)i, scored) != 0) Py_CLEAR(counts);
    }
    return counts;
}

const char count_scored_doc[] =
    "count_scored(samples, token_offsets, action_offsets)\n--\n\n"
    "Return how many response tokens of the chosen samples (int64[n]) have a predecessor; offsets int64[N+1] as in SampleColumns.\n"
    "Raises TypeError or ValueError where there is no such sample, or none that has a token and at most as many response tokens.";

PyObject *count_scored(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *chosen, *token_offsets, *action_offsets;
    Samples samples;
    if (!PyArg_ParseTuple(arguments, "OOO:count_scored", &chosen, &token_offsets, &action_offsets)) return NULL;
    int complete = samples_read(&samples, chosen, token_offsets, action_offsets, INT64_MAX);
    PyMem_Free(samples.entries);
    return complete ? PyLong_FromSize_t(samples.scored) : NULL;
}

const char write_padded_doc[] =
    "write_padded(out, contents, index, lengths, input_ids, token_offsets, action_offsets, samples, row_offsets, shapes, pad)\n--\n\n"
    "Write micro-batches, one sample flush right in each row or none; `shapes` is a tuple of (rows, width, action_width). `out` int64 holds,\n"
    "micro-batch by micro-batch, [len(contents), rows, width]: for each letter of contents, 't' the tokens behind `pad`, 'm' 1 on them and 0\n"
    "before, 'p' 0, 1, ... on them and 0 before. `index` int64[3, scored]: of every response token with a predecessor its place among the\n"
    "response tokens of its micro-batch, its row, and its predecessor's column. `lengths` int64[n]: each sample's tokens. The samples\n"
    "int64[n] are chosen of columns: input_ids int64 or int32, offsets int64[N+1]; row_offsets int64[rows+1] of all micro-batches, each from\n"
    "0 on. Returns a tuple of how many entries of `index` each micro-batch has. Raises TypeError or ValueError before anything is written.";

PyObject *write_padded(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *out, *index, *lengths, *input_ids, *token_offsets, *action_offsets, *chosen, *offsets, *shapes, *result = NULL;
    long long pad;
    Target target = {0};
    Samples samples = {0};
    size_t ends = SIZE_MAX;
    int64_t *row_offsets = NULL;
    MicroBatch *micro_batches = NULL;
    if (!PyArg_ParseTuple(arguments, "OsOOOOOOOO!L:write_padded", &out, &target.contents, &index, &lengths, &input_ids, &token_offsets,
                          &action_offsets, &chosen, &offsets, &PyTuple_Type, &shapes, &pad)) {
        return NULL;
    }
    target.pad = pad;
    size_t count = (size_t)PyTuple_Size(shapes);
    if ((row_offsets = indices_copied(offsets, &ends, "row_offsets")) == NULL) goto done;
    if (!array_open_as(&target.out, out, 1, INT64, "out")) goto done;
    if (!array_open_as(&target.index, index, 1, INT64, "index")) goto done;
    if (!array_open_as(&target.lengths, lengths, 1, INT64, "lengths")) goto done;
    if (!array_open(&target.input_ids, input_ids, 0, "input_ids")) goto done;
    if (target.input_ids.kind != INT64 && target.input_ids.kind != INT32) {
        PyErr_SetString(PyExc_TypeError, "input_ids is neither int64 nor int32");
        goto done;
    }
    if (!samples_read(&samples, chosen, token_offsets, action_offsets, target.input_ids.count)) goto done;
    if ((micro_batches = micro_batches_read(shapes, count, &samples, row_offsets, ends)) == NULL) goto done;
    if (!sizes_fit(&target, &samples, micro_batches, count)) goto done;
    if ((result = scored_counts(micro_batches, count)) == NULL) goto done;
    Py_BEGIN_ALLOW_THREADS
    write_all(&target, &samples, micro_batches, count);
    Py_END_ALLOW_THREADS
done:
    PyMem_Free(row_offsets);
    PyMem_Free(samples.entries);
    PyMem_Free(micro_batches);
    array_close(&target.out);
    array_close(&target.index);
    array_close(&target.lengths);
    array_close(&target.input_ids);
    return result;
}
