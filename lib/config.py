"""Configuration and errors: dataclass fields become flags, and every error becomes one line."""

import argparse
import contextlib
import dataclasses
import os
import re
import sys
from functools import partial

import torch

PATH = "path"  # as `allowed`: a file or folder, in which ~ is expanded


def setting(default, help="", allowed=None):
    """A dataclass field that is also a command-line flag.

    allowed: the legal values, or an interval such as "[1, 1000]" or "(0, 1)" (ends excluded), or
    PATH. A field without a help text is not a flag.
    """
    return dataclasses.field(default=default, metadata={"help": help, "allowed": allowed})


# Flags shared by all programs.
DEVICE = setting(None, "default: cuda if available, else mps, else cpu", ("cpu", "cuda", "mps"))
DTYPE = setting(
    None, "dtype of autocast (default: the device's fastest)", ("float32", "bfloat16", "float16")
)


def validate_config(config):
    """Raise ValueError, naming what is allowed, if a field of a dataclass is out of range."""
    for field in dataclasses.fields(config):
        value, allowed = getattr(config, field.name), field.metadata.get("allowed")
        if value is None or allowed in (None, PATH):
            continue
        if isinstance(allowed, tuple):
            if value not in allowed:
                raise ValueError(f"--{field.name} is {value!r}; choose from {', '.join(allowed)}")
        else:
            values = value if isinstance(value, (tuple, list)) else [value]
            if not all(in_interval(x, allowed) for x in values):
                raise ValueError(f"--{field.name} is {value}; it must be in {allowed}")


def in_interval(value, interval):
    """Whether a number lies in an interval such as "[1, 1000)". NaN lies in none."""
    low, high = map(float, interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    return above and (value <= high if interval[-1] == "]" else value < high)


def pick_fields(config_class, args, **override):
    """Build a configuration from the attributes of a namespace that are fields of its class."""
    names = [field.name for field in dataclasses.fields(config_class)]
    return config_class(**{n: getattr(args, n) for n in names if hasattr(args, n)} | override)


def defaults(*config_classes):
    """{flag: default} for all fields that are flags."""
    found = {}
    for config_class in config_classes:
        for field in dataclasses.fields(config_class):
            if field.metadata.get("help"):
                found[field.name] = field.default
    return found


class Parser(argparse.ArgumentParser):
    """An argument parser that gets its flags from dataclasses and reports an error in one line."""

    def __init__(self, command, doc, epilog=None):
        formatter = partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=100)
        super().__init__(
            usage=f"python {command} [flags]",
            description=doc,
            epilog=epilog,
            formatter_class=formatter,
            allow_abbrev=False,
        )
        for stream in (sys.stdout, sys.stderr):  # file names may contain bytes that are not UTF-8
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")

    def add_settings(self, title, config_class, preset=()):
        """Add one flag per field, in a group. A flag that is not given is absent from the
        namespace, so a preset can override the default."""
        group = self.add_argument_group(title)
        for field in dataclasses.fields(config_class):
            help, allowed = field.metadata.get("help"), field.metadata.get("allowed")
            if not help:
                continue
            kind = getattr(field.type, "__args__", (field.type,))[0]  # int | None -> int
            options = {"default": argparse.SUPPRESS}
            if field.type is bool:
                options["action"] = "store_true"
            elif kind is bool:
                options["action"] = argparse.BooleanOptionalAction
            elif kind is tuple:
                options |= {"type": float, "nargs": "+"}
            elif allowed == PATH:
                options["type"] = os.path.expanduser
            else:
                options["type"] = kind
                options["choices"] = allowed if isinstance(allowed, tuple) else None
            if field.name in preset:
                help += " (from the preset)"
            elif field.default is not None and field.type is not bool:
                help += f" (default: {field.default})"
            group.add_argument(f"--{field.name}", help=help.replace("%", "%%"), **options)

    def error(self, message):
        raise ValueError(message)  # catch_errors prints it


@contextlib.contextmanager
def catch_errors(remedy="use a smaller model or batch"):
    """The one place where errors are caught: `main` runs inside it.

    A ValueError or OSError is the user's mistake: it ends in one line, with exit code 2. Running
    out of memory ends in one line, with exit code 1. Once the caller sets `status.running`, only
    OSErrors (a full disk) and RunFailed end in one line, with exit code 1; any other exception is a
    bug and keeps its traceback.
    """
    status = argparse.Namespace(running=False)
    try:
        yield status
    except KeyboardInterrupt:
        leave(130, "interrupted")
    except RunFailed as error:
        leave(1, str(error))
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate mem" in str(error):
            leave(1, f"out of memory: {remedy}")
        if isinstance(error, OSError) or isinstance(error, ValueError) and not status.running:
            leave(1 if status.running else 2, str(error))
        if "by peer" in str(error):  # gloo: another process of this run has ended and printed why
            leave(1)
        raise


class RunFailed(Exception):
    """A failure during a run (exit code 1), such as a loss that is not finite."""


def leave(code, message=""):
    """Print the message, if any, as one line and exit.

    With several processes, exit without running destructors. Those of gloo hold the GIL while they
    wait for a thread that needs it, so they can hang forever (pytorch#190489).
    """
    if message:
        message = re.sub(r"(\S{200})\S+", r"\1...", " ".join(message.split()))
        print(f"error: {message}", file=sys.stderr, flush=True)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
