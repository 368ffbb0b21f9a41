"""Make a module of a local file from its recorded text, so that every process runs the code that was hashed."""

import hashlib
import linecache
import sys
from types import ModuleType

from skyrl_engine.registry.record import PluginRecord


def local_module(record: PluginRecord) -> ModuleType:
    """Return the module of a local file's record; every name of one file with one content shares the same module.

    It stands in sys.modules, under a name made of path and content, because attrs and pickle look classes up there. Raises whatever the
    file raises.
    """
    assert record.path is not None, f"{record} is of no file"
    assert record.source_text is not None, f"{record} is recorded without its content"
    file = str(record.path)
    identity = f"{record.sha256} {file}".encode()
    name = f"skyrl_engine_local_{hashlib.sha256(identity).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module
    # Tracebacks and inspect.getsource read lines here; on another machine the file itself is not there.
    linecache.cache[file] = (len(record.source_text), None, record.source_text.splitlines(keepends=True), file)
    try:
        exec(compile(record.source_text.encode(), file, "exec"), vars(module))  # noqa: S102 - the user named this file to be run
    except BaseException:
        del sys.modules[name]
        raise
    return module
