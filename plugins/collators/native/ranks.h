#ifndef SKYRL_ENGINE_RANKS_H
#define SKYRL_ENGINE_RANKS_H

#include "arrays.h"

extern const char balance_doc[];
PyObject *balance(PyObject *module, PyObject *arguments);

#endif
