import subprocess
import sys

import pytest

from skyrl_tx.process.setup import enable_huge_pages

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's tunables exist on Linux only")


def test_other_settings_stay():
    environment = {"GLIBC_TUNABLES": "glibc.malloc.check=0"}
    assert enable_huge_pages(environment)
    assert environment["GLIBC_TUNABLES"] == "glibc.malloc.check=0:glibc.malloc.hugetlb=1"


def test_a_value_set_by_the_user_stays():
    environment = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    assert not enable_huge_pages(environment)
    assert environment == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}


def test_restart_happens_once_and_keeps_the_arguments():
    program = (
        "import os, sys; from skyrl_tx.process.setup import restart_with_huge_pages as restart; restart();"
        "print(os.environ['GLIBC_TUNABLES'], sys.argv[1:])"
    )
    run = subprocess.run([sys.executable, "-c", program, "a b"], env={}, capture_output=True, text=True, check=True)
    assert run.stdout == "glibc.malloc.hugetlb=1 ['a b']\n"
