if __name__ != "plsc.models":
    raise ImportError("this folder is the package plsc.models: import plsc.models")
