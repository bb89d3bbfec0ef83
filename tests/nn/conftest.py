import pytest

from model.nn.weights_io import export_model


@pytest.fixture
def exported(model, tokenizer, tmp_path):
    """A Hugging Face directory with the weights of `model`."""
    export_model(model, tokenizer, tmp_path / "best")
    return tmp_path / "best"
