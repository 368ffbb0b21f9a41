#include "arrays.h"

#include <string.h>

static Kind kind_of(const Py_buffer *buffer) {
    const char *format = buffer->format == NULL ? "B" : buffer->format;
    const uint16_t probe = 1;
    const char native_order = *(const char *)&probe ? '<' : '>';
    if (*format == '@' || *format == '=' || *format == '^' || *format == native_order) format++;
    if (format[0] == '\0' || format[1] != '\0') return OTHER;
    if (strchr("ilq", format[0]) != NULL && buffer->itemsize == 8) return INT64;
    if (strchr("ilq", format[0]) != NULL && buffer->itemsize == 4) return INT32;
    if (format[0] == 'f' && buffer->itemsize == 4) return FLOAT32;
    if (format[0] == 'B' && buffer->itemsize == 1) return UINT8;
    return OTHER;
}

int array_open(Array *array, PyObject *object, int writable, const char *name) {
    memset(array, 0, sizeof *array);
    if (PyObject_GetBuffer(object, &array->buffer, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0)) != 0) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s is no C-contiguous%s array", name, writable ? " and writable" : "");
        memset(array, 0, sizeof *array);
        return 0;
    }
    array->data = array->buffer.buf;
    array->kind = kind_of(&array->buffer);
    array->count = (size_t)(array->buffer.len / (array->buffer.itemsize > 0 ? array->buffer.itemsize : 1));
    if (array->kind == OTHER) {
        PyErr_Format(PyExc_TypeError, "%s is neither int64, int32, float32 nor uint8", name);
    } else if (writable && array->count > 0 && (uintptr_t)array->data % (uintptr_t)array->buffer.itemsize != 0) {
        PyErr_Format(PyExc_ValueError, "%s is not aligned to its elements", name);
    } else {
        return 1;
    }
    array_close(array);
    return 0;
}

int array_open_as(Array *array, PyObject *object, int writable, Kind kind, const char *name) {
    static const char *const words[] = {"int64", "int32", "float32", "uint8"};
    if (!array_open(array, object, writable, name)) return 0;
    if (array->kind == kind) return 1;
    PyErr_Format(PyExc_TypeError, "%s is %s, not %s", name, words[array->kind], words[kind]);
    array_close(array);
    return 0;
}

void array_close(Array *array) {
    if (array->buffer.obj != NULL) PyBuffer_Release(&array->buffer);
    memset(array, 0, sizeof *array);
}

int arrays_overlap(const Array *first, const Array *second) {
    uintptr_t one = (uintptr_t)first->data, other = (uintptr_t)second->data;
    size_t bytes = (size_t)first->buffer.len, other_bytes = (size_t)second->buffer.len;
    if (bytes == 0 || other_bytes == 0) return 0;
    return one <= other ? other - one < bytes : one - other < other_bytes;
}

int64_t *indices_copied(PyObject *object, size_t *count, const char *name) {
    Array array;
    int64_t *copy = NULL;
    if (!array_open_as(&array, object, 0, INT64, name)) return NULL;
    if (*count == SIZE_MAX) *count = array.count;
    if (array.count != *count) {
        PyErr_Format(PyExc_ValueError, "%s has %zu entries, not %zu", name, array.count, *count);
    } else {
        copy = PyMem_Malloc(array.count * sizeof *copy + 1);
        if (copy == NULL) {
            PyErr_NoMemory();
        } else if (array.count > 0) {
            memcpy(copy, array.data, array.count * sizeof *copy);
        }
    }
    array_close(&array);
    return copy;
}
