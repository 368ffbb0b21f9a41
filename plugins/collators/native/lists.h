#ifndef SKYRL_ENGINE_LISTS_H
#define SKYRL_ENGINE_LISTS_H

#include "arrays.h"

extern const char measure_lists_doc[];
PyObject *measure_lists(PyObject *module, PyObject *arguments);

extern const char read_lists_doc[];
PyObject *read_lists(PyObject *module, PyObject *arguments);

#endif
