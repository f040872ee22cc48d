"""An attack on the promises: clients that know nothing but the contract, and a service that is killed under them."""
