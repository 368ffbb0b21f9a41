#ifndef SKYRL_ENGINE_GATHER_H
#define SKYRL_ENGINE_GATHER_H

#include "arrays.h"

extern const char write_gather_doc[];
PyObject *write_gather(PyObject *module, PyObject *arguments);

#endif
