if __name__ != "plsc.tools":
    raise ImportError("this folder is the package plsc.tools: import plsc.tools")
