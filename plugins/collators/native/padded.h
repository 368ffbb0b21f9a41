#ifndef SKYRL_ENGINE_PADDED_H
#define SKYRL_ENGINE_PADDED_H

#include "arrays.h"

extern const char count_scored_doc[];
PyObject *count_scored(PyObject *module, PyObject *arguments);

extern const char write_padded_doc[];
PyObject *write_padded(PyObject *module, PyObject *arguments);

#endif
