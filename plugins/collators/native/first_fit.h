#ifndef SKYRL_ENGINE_FIRST_FIT_H
#define SKYRL_ENGINE_FIRST_FIT_H

#include "arrays.h"

extern const char first_fit_doc[];
PyObject *first_fit(PyObject *module, PyObject *arguments);

#endif
