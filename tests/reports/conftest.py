import pytest

from tests.reports.lab import write_lab


@pytest.fixture(scope="package")
def lab_folder(tmp_path_factory):
    """Two measured runs and their summary; tests only read it."""
    return write_lab(tmp_path_factory.mktemp("lab"))
