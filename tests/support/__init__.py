"""What the tests share: slow twins, tiny models, tiny worlds."""
