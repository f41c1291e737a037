"""What custom recipes are made of: `recipe.CustomRecipe(qfactory=..)` takes the functions of `quantizer_factories`."""

from ...common import absent

__getattr__ = absent.getter(__name__)
