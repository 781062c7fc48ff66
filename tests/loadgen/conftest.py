import pytest
from fake_completions import FakeServer


@pytest.fixture
def server():
    fake = FakeServer()
    yield fake
    fake.close()
