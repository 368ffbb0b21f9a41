"""Make a module of a local file from bytes that were read once, so that every process runs the code that was hashed."""

import hashlib
import linecache
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from skyrl_engine.registry.run_directories import guard_imports, refuse_code_inside


def local_module(path: Path, content: bytes, *, siblings: bool = False) -> ModuleType:
    """Return the module of a local file; every name of one file with one content shares the same module.

    It is in sys.modules, under a name made of path and content, because attrs and pickle look classes up there. With `siblings` it may
    import the files next to it. Raises PluginBlockedError for a file in a run directory, and whatever the file raises.
    """
    refuse_code_inside(path)
    guard_imports()
    file = str(path)
    identity = f"{hashlib.sha256(content).hexdigest()} {file}".encode()
    name = f"skyrl_engine_local_{hashlib.sha256(identity).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module
    # Tracebacks and inspect.getsource read lines here; on another machine the file itself is not there.
    text = content.decode("utf-8", errors="replace")
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    folder = str(path.absolute().parent)
    if siblings:
        sys.path.insert(0, folder)
    try:
        exec(SourceFileLoader(name, file).source_to_code(content, file), vars(module))  # noqa: S102 - the user named this file to be run
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        if siblings:
            sys.path.remove(folder)
    return module
