"""What custom recipes are made of: `recipe.CustomRecipe(qfactory=..)` takes the functions of `quantizer_factories`."""
