"""Episodes that programs play, in processes of their own."""
