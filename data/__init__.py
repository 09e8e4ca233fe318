if __name__ != "plsc.data":
    raise ImportError("this folder is the package plsc.data: import plsc.data")
