//go:build linux

package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"agentctl/manifest"
	"agentctl/transport/link"
)

// A board with echo and metrics has minTools: echo.invoke, metrics.snapshot and metrics.subscribe. A mock
// board of "agentctl run --mock" announces mockTools: these, its history, and what shows a board.
const (
	minTools  = 3
	mockTools = 9
)

// startBoards links n boards that announce so many tools each, which mock boards cannot.
func (b *bench) startBoards(r *relayProc, n, tools int) (*process, error) {
	p, _, err := start(2*time.Minute, isReady, b.self, "serve", "boards", "--relay", "ws"+strings.TrimPrefix(r.url, "http"), "--token-file", r.tokens,
		"--ca-file", r.ca, "--count", strconv.Itoa(n), "--tools", strconv.Itoa(tools))
	return p, err
}

// echoBoard is a board with the metric tools and any number of echoes.
type echoBoard struct{ capabilities []manifest.Capability }

func newEchoBoard(tools int) *echoBoard {
	caps := []manifest.Capability{manifest.Echo(), manifest.Metrics()}
	for i := range tools - minTools {
		c := manifest.Echo()
		c.CapID += strconv.Itoa(i + 2)
		caps = append(caps, c)
	}
	return &echoBoard{caps}
}

func (e *echoBoard) Capabilities() []manifest.Capability { return e.capabilities }

func (e *echoBoard) Call(_ context.Context, tool manifest.ToolName, _ []byte) ([]byte, link.StreamFunc, error) {
	if tool.Verb != manifest.VerbInvoke {
		return nil, nil, manifest.E(manifest.Internal, "this board only answers echo")
	}
	return fmt.Appendf(nil, `{"node_id":%q,"received_at_ms":%d,"message":"hello"}`, tool.NodeID, time.Now().UnixMilli()), nil, nil
}

// serveBoards runs the boards of startBoards.
func serveBoards(args []string) error {
	f := flag.NewFlagSet("boards", flag.ContinueOnError)
	relay, tokenFile, caFile := f.String("relay", "", ""), f.String("token-file", "", ""), f.String("ca-file", "", "")
	count, tools := f.Int("count", 0, ""), f.Int("tools", mockTools, "")
	if err := f.Parse(args); err != nil {
		return err
	}
	data, err := os.ReadFile(*tokenFile)
	if err != nil {
		return err
	}
	tokens := strings.Fields(string(data))
	if len(tokens) < *count {
		return fmt.Errorf("%d tokens for %d boards", len(tokens), *count)
	}
	var config *tls.Config
	if *caFile != "" {
		pem, err := os.ReadFile(*caFile)
		if err != nil {
			return err
		}
		config = &tls.Config{RootCAs: x509.NewCertPool()}
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return errors.New("no certificate in " + *caFile)
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	board := newEchoBoard(*tools)
	dialing := make(chan struct{}, 64)
	var linked atomic.Int64
	var wg sync.WaitGroup
	for i, token := range tokens[:*count] {
		onFirstLink := sync.OnceFunc(func() {
			if linked.Add(1) == int64(*count) {
				fmt.Println(`{"msg":"ready"}`)
			}
		})
		client := link.NewClient(link.ClientOptions{
			Dial: func(ctx context.Context) (link.Conn, error) {
				dialing <- struct{}{}
				defer func() { <-dialing }()
				return link.Dial(ctx, *relay, link.DialOptions{TLS: config})
			},
			Token: func() (string, error) { return token, nil }, Version: "bench", InstanceID: fmt.Sprintf("%032x", i+1), Name: fmt.Sprintf("bench-%d", i+1), Handler: board,
			OnReady: func(link.AuthOK) { onFirstLink() },
		})
		wg.Go(func() { _ = client.Run(ctx) })
	}
	wg.Wait()
	return nil
}
