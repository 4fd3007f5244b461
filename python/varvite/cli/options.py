"""Arguments and options that several commands have."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from varvite.buckets import options_of_texts
from varvite.cli.opening import Place
from varvite.cli.output import Output

__all__ = ["Reference", "bytes_option", "place_argument", "run_argument", "with_output"]

Function = TypeVar("Function", bound=Callable[..., Any])


class Reference(click.ParamType[str]):
    """A reference to a snapshot as the engine reads it: a bare number is a step."""

    name = "ref"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the reference; what it means is for the engine to say."""
        del param, ctx
        return f"step:{value}" if value.isascii() and value.isdecimal() else str(value)


def place_argument(name: str) -> Callable[[Function], Function]:
    """Adds an argument that names a folder or a bucket, and `--option` for the bucket.

    Args:
        name: Name of the argument, under which the function gets a `Place`.
    """

    def decorate(function: Function) -> Function:
        @click.argument(name, type=click.Path(), metavar=name.upper())
        @click.option(
            "-o",
            "--option",
            "bucket_options",
            multiple=True,
            metavar="NAME=VALUE",
            help="Option of the bucket, such as region=eu-west-1; can be repeated.",
        )
        @functools.wraps(function)
        def run(*args: Any, bucket_options: tuple[str, ...], **options: Any) -> Any:
            place = Place(options.pop(name), options_of_texts(bucket_options))
            return function(*args, **{name: place}, **options)

        return run  # type: ignore[return-value]

    return decorate


run_argument = place_argument("run")

bytes_option = click.option(
    "--bytes", "exact_bytes", is_flag=True, help="Show sizes as exact numbers of bytes."
)


def with_output(command: str) -> Callable[[Function], Function]:
    """Adds `--json`, `--quiet` and `--color`, and hands the function an `Output` for them.

    Args:
        command: Name of the command, which its schema carries.
    """

    def decorate(function: Function) -> Function:
        @click.option("--json", "is_json", is_flag=True, help="Write one JSON object.")
        @click.option("-q", "--quiet", is_flag=True, help="Write no messages, and only the essential lines.")
        @click.option(
            "--color",
            type=click.Choice(["auto", "always", "never"]),
            default="auto",
            show_default=True,
            help="Use colours; `auto` honours NO_COLOR and FORCE_COLOR.",
        )
        @functools.wraps(function)
        def run(*args: Any, is_json: bool, quiet: bool, color: str, **options: Any) -> Any:
            return function(
                *args, output=Output(command, is_json=is_json, quiet=quiet, color=color), **options
            )

        return run  # type: ignore[return-value]

    return decorate
