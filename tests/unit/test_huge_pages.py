import subprocess
import sys

import pytest

from skyrl_tx.huge_pages import ask_for_huge_pages

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's tunables exist on Linux only")


def test_asks_beside_other_tunables():
    environment = {"GLIBC_TUNABLES": "glibc.malloc.check=0"}
    assert ask_for_huge_pages(environment)
    assert environment["GLIBC_TUNABLES"] == "glibc.malloc.check=0:glibc.malloc.hugetlb=1"


def test_leaves_the_users_own_choice():
    environment = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    assert not ask_for_huge_pages(environment)
    assert environment == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}


def test_a_program_begins_anew_once_with_its_own_arguments():
    program = (
        "import os, sys; from skyrl_tx.huge_pages import restart_with_huge_pages; restart_with_huge_pages();"
        "print(os.environ['GLIBC_TUNABLES'], sys.argv[1:])"
    )
    run = subprocess.run([sys.executable, "-c", program, "a b"], env={}, capture_output=True, text=True, check=True)
    assert run.stdout == "glibc.malloc.hugetlb=1 ['a b']\n"
