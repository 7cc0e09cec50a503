// A client of the ext_proc server on grpc-go: says what it saw of health, a streamed request and answer, a large
// message, a cancelled stream and a drain. Messages are bytes that the caller made.
package main

import (
	"bufio"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

type raw struct{}

func (raw) Marshal(v any) ([]byte, error)      { return *v.(*[]byte), nil }
func (raw) Unmarshal(data []byte, v any) error { *v.(*[]byte) = append([]byte{}, data...); return nil }
func (raw) Name() string                       { return "proto" }

func say(words ...any) { fmt.Println(words...) }

// Each line of the input is a step: "check SERVICE", "watch SERVICE", "open", "send BASE64", "receive", "close",
// "cancel". Each but "open", "close" and "cancel" says one line.
func main() {
	conn, err := grpc.NewClient(os.Args[1], grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
	if err != nil {
		panic(err)
	}
	base, end := context.WithTimeout(context.Background(), 60*time.Second)
	defer end()
	health := grpc_health_v1.NewHealthClient(conn)
	var watched grpc_health_v1.Health_WatchClient
	var stream grpc.ClientStream
	var cancel context.CancelFunc
	lines := bufio.NewReader(os.Stdin)
	for {
		line, err := lines.ReadString('\n')
		if err == io.EOF {
			return
		}
		step, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch step {
		case "check":
			answer, err := health.Check(base, &grpc_health_v1.HealthCheckRequest{Service: rest})
			say(answer.GetStatus(), status.Code(err))
		case "watch":
			if watched == nil {
				watched, err = health.Watch(base, &grpc_health_v1.HealthCheckRequest{Service: rest})
			}
			answer, err := watched.Recv()
			say(answer.GetStatus(), status.Code(err))
		case "open":
			var scope context.Context
			scope, cancel = context.WithCancel(base)
			stream, err = conn.NewStream(scope, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true},
				"/envoy.service.ext_proc.v3.ExternalProcessor/Process", grpc.ForceCodec(raw{}))
			if err != nil {
				say("not opened", status.Code(err))
			}
		case "send":
			data, _ := base64.StdEncoding.DecodeString(rest)
			if err := stream.SendMsg(&data); err != nil {
				say("not sent", status.Code(err))
			}
		case "receive":
			var data []byte
			if err := stream.RecvMsg(&data); err == io.EOF {
				say("end")
			} else if err != nil {
				say(status.Code(err))
			} else {
				say(base64.StdEncoding.EncodeToString(data))
			}
		case "close":
			_ = stream.CloseSend()
		case "cancel":
			cancel()
		}
	}
}
