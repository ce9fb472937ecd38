"""One layer's forward, backward and update, and what can be wrapped around them."""
