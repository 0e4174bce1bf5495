"""Networks to try the library on."""
