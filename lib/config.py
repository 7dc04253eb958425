"""Flags and errors: what every program does before and after its work."""

import argparse
import contextlib
import dataclasses
import os
import re
import sys

import torch


class UserError(ValueError):
    """A user's mistake: a path, a file, or flags that do not fit the data. `main` prints the
    message in one line and exits with code 2. Raise it where the mistake is found; every other
    exception is a bug, and keeps its traceback."""


class RunFailure(Exception):
    """What stops a run and is nobody's mistake, such as a full disk: one line, exit code 1."""


# How RuntimeErrors of PyTorch begin: no memory left on a CPU or an Apple GPU; gloo has lost the
# connection to another process of this run, which has ended and printed why.
NO_MEMORY = "[enforce fail at alloc_cpu.cpp", "MPS backend out of memory"
LOST_PROCESS = re.compile(r"\[[^]]*gloo/transport/[^]]*\] ")


@contextlib.contextmanager
def one_line_errors(remedy="use a smaller model or batch"):
    """`main` runs inside it. A UserError, a RunFailure, a missing optional package, running out of
    memory (`remedy`: what to do then) and Ctrl-C end in one line on standard error. No other
    exception is caught: an OSError of a hook or an objective is a bug like any other."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and LastingStream(stream) for stream in streams)
    if hasattr(sys.stdin, "reconfigure"):  # None if it is closed
        sys.stdin.reconfigure(errors="backslashreplace")
    try:
        yield
    except KeyboardInterrupt:
        leave(130, "interrupted")
    except UserError as error:
        leave(2, str(error))
    except ModuleNotFoundError as error:
        if error.name not in ("matplotlib", "sklearn", "transformers"):
            raise
        leave(2, f"{error}: pip install -r requirements-dev.txt")
    except RunFailure as error:
        leave(1, str(error))
    except (RuntimeError, MemoryError) as error:
        no_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if no_memory or str(error).startswith(NO_MEMORY):
            leave(1, f"out of memory: {remedy}")
        if LOST_PROCESS.match(str(error)):
            leave(1)
        raise
    finally:
        sys.stdout, sys.stderr = streams


class LastingStream:
    """Standard output or error, where every write is flushed. If its reader is gone (a closed pipe
    or terminal), what is printed is lost, and the program continues."""

    def __init__(self, stream):
        self.stream = stream
        if hasattr(stream, "reconfigure"):  # file names may contain bytes that are not UTF-8
            stream.reconfigure(errors="backslashreplace")

    def write(self, text):
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        return len(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)


def printable(text):
    """Escape control characters, which may come from a file, except for newlines and tabs."""
    return re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f]", lambda found: repr(found[0])[1:-1], text)


def leave(code, message=""):
    """Print the message, if any, as one line and exit.

    With several processes, exit without running destructors. Those of gloo hold the GIL while they
    wait for a thread that needs it, so they can hang forever (pytorch#190489).
    """
    if message:
        print(f"error: {printable(' '.join(message.split()))}", file=sys.stderr)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        os._exit(code)
    sys.exit(code)


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one line, and shows defaults in its help."""

    def __init__(self, command, doc):
        super().__init__(
            usage=f"python {command} [flags]",
            description=doc,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message):
        raise UserError(message)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog):
        super().__init__(prog, max_help_position=30, width=100)

    def _get_help_string(self, action):
        shown = not any(action.default is x for x in (None, False, argparse.SUPPRESS))
        return action.help + " (default: %(default)s)" * shown


def between(kind, interval):
    """A `type` for add_argument: an int or float within an interval such as "[1, 1000]" or
    "(0, 1)" (ends excluded). NaN lies in none."""
    low, high = map(float, interval[1:-1].split(","))

    def convert(text):
        value = kind(text)
        above = value >= low if interval[0] == "[" else value > low
        below = value <= high if interval[-1] == "]" else value < high
        if not (above and below):
            raise argparse.ArgumentTypeError(f"{text} is not in {interval}")
        return value

    convert.__name__ = kind.__name__  # in argparse's "invalid int value"
    return convert


def add_device_flags(parser):
    """The flags --device, --dtype and --compile, which several programs have."""
    flag = parser.add_argument_group("device").add_argument
    flag("--device", choices=("cpu", "cuda", "mps"), help="default: cuda, else mps, else cpu")
    dtypes = ("float32", "bfloat16", "float16")
    flag("--dtype", choices=dtypes, help="dtype of autocast (default: see lib/device.py)")
    flag("--compile", action=argparse.BooleanOptionalAction, help="torch.compile")


def pick_fields(config_class, args, **override):
    """Build a configuration from the attributes of a namespace that are fields of its class."""
    names = [field.name for field in dataclasses.fields(config_class)]
    return config_class(**{n: getattr(args, n) for n in names if hasattr(args, n)} | override)
