package handlers

import (
	"context"
	"encoding/json"
	"strconv"

	"github.com/go-json-experiment/json/jsontext"

	"agentctl/manifest"
	"agentctl/prober"
)

// Clock returns trusted time in Unix milliseconds; ok is false while there is none
// (clock.Clock.NowMS).
type Clock func() (ms int64, ok bool)

// now returns trusted time for a result, or E_INTERNAL while there is none: the schemas refuse times
// before prober.MinTSMS.
func (c Clock) now() (int64, error) {
	ms, ok := c()
	if !ok || ms < prober.MinTSMS {
		return 0, manifest.E(manifest.Internal, "this device's clock is not set yet; retry when it is")
	}
	return ms, nil
}

// Echo answers system.echo (RFC-0005): the message unchanged, with the device's time. It
// has no side effect. Use NewEcho.
type Echo struct{ clock Clock }

var _ Handler = (*Echo)(nil)

// NewEcho returns the handler of system.echo.
func NewEcho(clock Clock) *Echo { return &Echo{clock} }

// Capability returns that of RFC-0005 §9.
func (e *Echo) Capability() manifest.Capability { return manifest.Echo() }

// Call answers one echo; E_INTERNAL while the clock is not set.
func (e *Echo) Call(_ context.Context, tool manifest.ToolName, args []byte) ([]byte, Stream, error) {
	now, err := e.clock.now() // first: received_at_ms is the time of handler entry
	if err != nil {
		return nil, nil, err
	}
	var in struct {
		Message string `json:"message"`
	}
	if err := json.Unmarshal(args, &in); err != nil {
		return nil, nil, err
	}
	// By hand: encoding/json would escape <, > and & in the message.
	b := make([]byte, 0, len(args)+len(tool.NodeID)+64)
	b = append(b, `{"message":`...)
	if b, err = jsontext.AppendQuote(b, in.Message); err != nil {
		return nil, nil, err
	}
	b = append(b, `,"received_at_ms":`...)
	b = strconv.AppendInt(b, now, 10)
	b = append(b, `,"node_id":"`...)
	b = append(b, tool.NodeID...)
	return append(b, `"}`...), nil, nil
}
