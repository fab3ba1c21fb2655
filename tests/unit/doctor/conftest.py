"""The doctor of these tests looks for no patches: two processes each time, which tests/unit/patches starts."""

import pytest

from r3train.doctor import patch_list


class NoPatches:
    def findings(self):
        return iter(())


@pytest.fixture(autouse=True)
def no_patches(monkeypatch):
    monkeypatch.setattr(patch_list, "PatchList", NoPatches)
