"""gar inside other libraries' training loops."""

from gar.integrations.transformers import GARArguments, GARMixin, GARTrainer

__all__ = ["GARArguments", "GARMixin", "GARTrainer"]
