"""`python -m foreshock_service.cli`."""

from foreshock_service.cli import main

if __name__ == "__main__":
    main()
