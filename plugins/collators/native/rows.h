#ifndef SKYRL_ENGINE_ROWS_H
#define SKYRL_ENGINE_ROWS_H

#include "arrays.h"

extern const char write_rows_doc[];
PyObject *write_rows(PyObject *module, PyObject *arguments);

#endif
