"""Errors survive pickling between processes and share one base."""

import inspect
import pickle

import pytest

from plugin import errors

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, Exception)
]


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_survives_pickling_with_its_message(kind: type[Exception]) -> None:
    copy = pickle.loads(pickle.dumps(kind("tis_clip is -1; it must be positive; raise it")))
    assert type(copy) is kind
    assert str(copy) == "tis_clip is -1; it must be positive; raise it"
    assert isinstance(copy, errors.MegatronTisError)
