//go:build linux

package control_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"sync"

	"agentctl/control"
	"agentctl/prober"
)

// A daemon's socket and a command that asks it, in one process.
func Example() {
	dir, err := os.MkdirTemp("", "ctl")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	p := prober.New(prober.Options{Source: prober.NewMockSource(1)})
	srv, err := control.NewServer(control.Options{Path: filepath.Join(dir, "agentctl.sock"), Prober: p, Version: "1.0.0"})
	if err != nil {
		log.Fatal(err)
	}
	if err := srv.Listen(); err != nil {
		log.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	wg.Go(func() { p.Run(ctx) })
	wg.Go(func() { srv.Serve(ctx) })

	c, err := control.Dial(ctx, srv.Addr())
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	s, err := c.Snapshot(ctx, "cpu", "memory")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("server", c.Hello().ServerVersion)
	fmt.Println("cpu", s.CPU != nil, "memory", s.Memory.Used <= s.Memory.Total, "disk", s.Disk != nil)
	// Output:
	// server 1.0.0
	// cpu true memory true disk false
}
