/* Arrays borrowed from Python through the buffer protocol. Only the limited C API: one binary serves every Python from 3.11 on. */
#ifndef SKYRL_ENGINE_ARRAYS_H
#define SKYRL_ENGINE_ARRAYS_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000 /* the first version whose stable API has the buffer protocol */
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

typedef enum { INT64, INT32, FLOAT32, UINT8, OTHER } Kind;

/* A C-contiguous array of `count` elements. Inputs may have any address; outputs are aligned to their element. */
typedef struct {
    Py_buffer buffer;
    char *data;
    size_t count;
    Kind kind;
} Array;

/* Borrow `object`; `name` is for messages. Returns 0 with a Python error set where it is no such array, and then borrows nothing. */
int array_open(Array *array, PyObject *object, int writable, const char *name);

/* As array_open, and it must be of this kind. */
int array_open_as(Array *array, PyObject *object, int writable, Kind kind, const char *name);

/* Give back; nothing where the array is not open (all zeros). */
void array_close(Array *array);

/* Whether two arrays share a byte. */
int arrays_overlap(const Array *first, const Array *second);

/* An own copy of an int64 array, which no other thread can change once it was checked. The caller frees it with PyMem_Free.
   Returns NULL with a Python error set where the object is no int64 array, has not `*count` elements (unless that is SIZE_MAX, which
   is then set), or memory is short. */
int64_t *indices_copied(PyObject *object, size_t *count, const char *name);

#endif
