package daemon

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"agentctl/handlers"
	"agentctl/prober"
	"agentctl/prober/inspect"
	"agentctl/transport/link"
)

const (
	// quietFleet is the number of mock boards beyond which each one is quiet: it samples
	// rarely unless somebody subscribes, and logs warnings only.
	quietFleet = 16
	// maxMockDials bounds the mock boards that dial at a time.
	maxMockDials = 64
)

// MockOptions describe simulated boards, each with its own link to one relay.
type MockOptions struct {
	Relay    string // URL
	TLS      *tls.Config
	Tokens   []string // one for each board
	Name     string   // board N is called NAME-N
	Version  string
	Interval time.Duration // base cadence of a small fleet
	Log      *zap.Logger
	OnReady  func() // called once when every board has had a link; nil for none
}

// RunMocks runs a simulated board for each token until ctx ends.
//
// All boards share this process's clock and configuration, but have an identity, a sampler and
// a link each. A failure of one board is not reported: a fleet is for load, and the relay shows
// which boards are online. All devices are made before the first one dials, so that an error
// of a device starts none.
func RunMocks(ctx context.Context, o MockOptions) error {
	if len(o.Tokens) > quietFleet {
		o.Interval = prober.MaxInterval
		o.Log = o.Log.WithOptions(zap.IncreaseLevel(zap.WarnLevel))
	}
	var linked atomic.Int64 // boards that have had a link
	slots := make(chan struct{}, maxMockDials)
	devices := make([]*device, len(o.Tokens))
	for i, token := range o.Tokens {
		// OnReady of a device is called after each reconnection; only the first link counts.
		onFirstLink := sync.OnceFunc(func() {
			if linked.Add(1) == int64(len(o.Tokens)) && o.OnReady != nil {
				o.OnReady()
			}
		})
		seed := uint64(i + 1)
		recorded := prober.NewMockHistory(seed, time.Now())
		machine := inspect.NewMock(seed, recorded, o.Version)
		var err error
		devices[i], err = newDevice(deviceOptions{
			Relay: o.Relay, TLS: o.TLS, DialSlots: slots, Version: o.Version, Log: o.Log,
			Token: func() (string, error) { return token, nil },
			Name:  o.Name + "-" + strconv.Itoa(i+1), InstanceID: mockInstanceID(token),
			Source: prober.NewMockSource(seed), Interval: o.Interval,
			History: mockHistory{recorded},
			Inspection: handlers.Inspections(handlers.InspectionOptions{
				Machine: machine, Modules: machine, Clock: func() (int64, bool) { return time.Now().UnixMilli(), true },
			}),
			OnReady: func(link.AuthOK) { onFirstLink() },
		}, time.Time{})
		if err != nil {
			return err
		}
	}
	var wg sync.WaitGroup
	for _, d := range devices {
		wg.Go(func() { _ = d.run(ctx) })
	}
	wg.Wait()
	return nil
}

// mockInstanceID returns an instance id that stays the same for a token.
//
// The relay would take a changing id for a copy of the token.
func mockInstanceID(token string) string {
	sum := sha256.Sum256([]byte("agentctl mock install\x00" + token))
	return hex.EncodeToString(sum[:16])
}
