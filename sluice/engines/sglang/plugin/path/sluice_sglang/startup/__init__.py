"""Steps of the launch script before SGLang itself starts."""
