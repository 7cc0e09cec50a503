// The process that holds a pod's namespaces open until the pod ends.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGINT, syscall.SIGTERM)
	<-end
}
