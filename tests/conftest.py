"""Settings of every test."""

import gc

gc.disable()  # while all is imported

from hypothesis import settings  # noqa: E402

from r3train.cpu.torchvision_stub import declare_ops_for_imports  # noqa: E402

declare_ops_for_imports()  # tests import transformers as our processes do

# a busy machine is slow: an example has no time limit; the examples are the same in every run, so that
# a change is judged by itself and not by luck
settings.register_profile("r3train", deadline=None, derandomize=True)
settings.load_profile("r3train")


def pytest_collection_finish():
    """Leave what was imported out of every search for garbage."""
    gc.freeze()
    gc.enable()
