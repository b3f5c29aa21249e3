"""How SGLang's scheduler receives, passes on and loads the weights of an update."""
