"""d-Simplex: old and new models share one fixed classifier, and need nothing else of each other.

Biondi et al., Stationary Representations, CVPR 2024 and TPAMI 2026. Each model is trained alone by
cross-entropy under the head `simplex`. A class has the same vertex in each model, so the models'
spaces agree.
"""

from nobackfill.errors import ConfigurationError, join_few
from nobackfill.training.method import EmbedderInputs, EmbedderMethod
from nobackfill.training.networks.embedder import EmbedderObjective
from nobackfill.training.networks.heads import SimplexHead, labels_of_new_classes


def _objective(inputs: EmbedderInputs) -> EmbedderObjective:
    """Make the objective of `independent`, after a check that the vertices agree with `old`'s.

    The old model is optional and is not trained against. export.py needs it to know the release
    whose vectors the new model can search.

    Raises:
        ConfigurationError: the head is not `simplex`; or the old model has another head, another
            dimension, or a class at another vertex.
    """
    config, old = inputs.config, inputs.old_classifier
    if config.head != "simplex":
        raise ConfigurationError(
            "method d_simplex: expected head: simplex, the fixed classifier of this method, got "
            f"head: {config.head}"
        )
    if old is not None:
        if not isinstance(old.head, SimplexHead) or old.encoder.dim != config.embedding_dim:
            raise ConfigurationError(
                f"method d_simplex: expected {config.old} to have head: simplex and embedding_dim: "
                f"{config.embedding_dim}, got another head or {old.encoder.dim} dimensions; only "
                "models that share one simplex are compatible"
            )
        vertices = labels_of_new_classes(inputs.class_names, old.class_names).tolist()
        moved = [old.class_names[i] for i, vertex in enumerate(vertices) if vertex != i]
        if moved:
            raise ConfigurationError(
                "method d_simplex: expected each class at the same place of the list as in "
                f"{config.old}, but these classes are at other places: {join_few(moved)}; list "
                "the old classes first, in their order, with class_list"
            )
    return EmbedderObjective(config, len(inputs.class_names))


D_SIMPLEX = EmbedderMethod(_objective, searches_directly=True)
