/* The gather index: where the model predicts each response token. */
#include "gather.h"

const char write_gather_doc[] =
    "write_gather(actions, rows, columns, sample_rows, action_counts, scored, first_columns)\n--\n\n"
    "Fill actions, rows, columns (int64, one entry per scored token). Sample i of n (int64[n] each) has action_counts[i] response tokens, of\n"
    "which the last scored[i] have a predecessor; the first of those is predicted in column first_columns[i] of row sample_rows[i].\n"
    "Raises TypeError or ValueError before anything is written.";

enum { SAMPLE_ROWS, ACTION_COUNTS, SCORED, FIRST_COLUMNS, INPUTS };
enum { ACTIONS, ROWS, COLUMNS, OUTPUTS };
static const char *const input_names[INPUTS] = {"sample_rows", "action_counts", "scored", "first_columns"};
static const char *const output_names[OUTPUTS] = {"actions", "rows", "columns"};

static int entries_fit(int64_t *const *inputs, size_t samples, const Array *outputs) {
    uint64_t total = 0;
    for (size_t i = 0; i < samples; i++) {
        int64_t scored = inputs[SCORED][i], counted = inputs[ACTION_COUNTS][i];
        if (scored < 0 || scored > counted) {
            PyErr_Format(PyExc_ValueError, "sample %zu scores %lld of %lld tokens", i, (long long)scored, (long long)counted);
            return 0;
        }
        if ((uint64_t)scored > outputs[ACTIONS].count - total) {
            PyErr_Format(PyExc_ValueError, "sample %zu scores more tokens than the %zu entries hold", i, outputs[ACTIONS].count);
            return 0;
        }
        total += (uint64_t)scored;
    }
    for (size_t i = 0; i < OUTPUTS; i++) {
        if (outputs[i].count != total) {
            PyErr_Format(PyExc_ValueError, "%s has %zu entries, not %zu", output_names[i], outputs[i].count, (size_t)total);
            return 0;
        }
    }
    if (arrays_overlap(&outputs[0], &outputs[1]) || arrays_overlap(&outputs[0], &outputs[2]) ||
        arrays_overlap(&outputs[1], &outputs[2])) {
        PyErr_SetString(PyExc_ValueError, "the outputs share memory");
        return 0;
    }
    return 1;
}

static void write_entries(int64_t *const *inputs, size_t samples, const Array *outputs) {
    int64_t *actions = (int64_t *)outputs[ACTIONS].data, *rows = (int64_t *)outputs[ROWS].data;
    int64_t *columns = (int64_t *)outputs[COLUMNS].data;
    uint64_t before = 0; /* actions of earlier samples; unsigned, since only scored counts are bounded */
    for (size_t i = 0; i < samples; i++) {
        size_t scored = (size_t)inputs[SCORED][i];
        uint64_t first_action = before + (uint64_t)inputs[ACTION_COUNTS][i] - scored;
        uint64_t first_column = (uint64_t)inputs[FIRST_COLUMNS][i];
        int64_t row = inputs[SAMPLE_ROWS][i];
        for (size_t k = 0; k < scored; k++) actions[k] = (int64_t)(first_action + k);
        for (size_t k = 0; k < scored; k++) rows[k] = row;
        for (size_t k = 0; k < scored; k++) columns[k] = (int64_t)(first_column + k);
        actions += scored;
        rows += scored;
        columns += scored;
        before += (uint64_t)inputs[ACTION_COUNTS][i];
    }
}

PyObject *write_gather(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *out[OUTPUTS], *in[INPUTS], *result = NULL;
    Array outputs[OUTPUTS] = {0};
    int64_t *inputs[INPUTS] = {NULL};
    size_t samples = SIZE_MAX;
    if (!PyArg_ParseTuple(arguments, "OOOOOOO:write_gather", &out[0], &out[1], &out[2], &in[0], &in[1], &in[2], &in[3])) return NULL;
    for (size_t i = 0; i < INPUTS; i++) {
        if ((inputs[i] = indices_copied(in[i], &samples, input_names[i])) == NULL) goto done;
    }
    for (size_t i = 0; i < OUTPUTS; i++) {
        if (!array_open_as(&outputs[i], out[i], 1, INT64, output_names[i])) goto done;
    }
    if (!entries_fit(inputs, samples, outputs)) goto done;
    Py_BEGIN_ALLOW_THREADS
    write_entries(inputs, samples, outputs);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    for (size_t i = 0; i < INPUTS; i++) PyMem_Free(inputs[i]);
    for (size_t i = 0; i < OUTPUTS; i++) array_close(&outputs[i]);
    return result;
}
