/* The extension module skyrl_engine_collators._kernels. */
#include "first_fit.h"
#include "gather.h"
#include "lists.h"
#include "padded.h"
#include "ranks.h"
#include "rows.h"

#define INTERFACE 4 /* raised with every change that Python sees; kernels.py refuses another one */

static PyMethodDef functions[] = {
    {"write_rows", write_rows, METH_VARARGS, write_rows_doc},
    {"write_gather", write_gather, METH_VARARGS, write_gather_doc},
    {"count_scored", count_scored, METH_VARARGS, count_scored_doc},
    {"write_padded", write_padded, METH_VARARGS, write_padded_doc},
    {"balance", balance, METH_VARARGS, balance_doc},
    {"first_fit", first_fit, METH_VARARGS, first_fit_doc},
    {"measure_lists", measure_lists, METH_VARARGS, measure_lists_doc},
    {"read_lists", read_lists, METH_VARARGS, read_lists_doc},
    {NULL, NULL, 0, NULL},
};

static int prepare(PyObject *module) { return PyModule_AddIntConstant(module, "INTERFACE", INTERFACE); }

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)prepare}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_kernels", "Dense rows from flat columns.", 0, functions, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&definition); }
