"""Keys of signatures."""

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat


def keys(folder: Path) -> tuple[Path, Path]:
    """A private key and its public one, as openssl writes them."""
    folder.mkdir()
    key = Ed25519PrivateKey.generate()
    private, public = folder / "key.pem", folder / "public.pem"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    private.chmod(0o600)
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public
