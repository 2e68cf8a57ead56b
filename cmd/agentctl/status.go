package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"agentctl/control"
	"agentctl/prober"
	"agentctl/transport/clock"
	"agentctl/transport/enroll"
	"agentctl/transport/link"
)

// status is what `agentctl status -o json` prints.
type status struct {
	NodeID         string         `json:"node_id"`
	Name           string         `json:"name"`
	Version        string         `json:"version"`
	UptimeS        int64          `json:"uptime_s"`
	Link           linkStatus     `json:"link"`
	Clock          clockStatus    `json:"clock"`
	Storage        storageStatus  `json:"storage"`
	Sampling       samplingStatus `json:"sampling"`
	Sample         *frame         `json:"sample"`
	CloneSuspected bool           `json:"clone_suspected"`
	Drops          uint64         `json:"drops"`
}

type linkStatus struct {
	State     link.State `json:"state"`
	Relay     string     `json:"relay"`
	SinceMS   int64      `json:"since_ms"`
	LastError *linkError `json:"last_error"`
}

type linkError struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
	AtMS    int64  `json:"at_ms"`
}

type clockStatus struct {
	State    clock.State `json:"state"`
	OffsetMS int64       `json:"offset_ms"`
}

type storageStatus struct {
	State string `json:"state"` // "off": this release keeps no history
	Path  string `json:"path"`
	Bytes int64  `json:"bytes"`
}

type samplingStatus struct {
	control.Sampling
	LastError string `json:"last_error,omitempty"` // why there is no sample
}

// frame is a sample with the nine fields of RFC-0009 §5.1.
type frame struct {
	NodeID string `json:"node_id"`
	prober.Sample
}

// identity is what status says of a device beyond its parts.
type identity struct {
	*enroll.Identity
	name, relay, stateDir string
	start                 time.Time
}

// newControl makes the device's control socket and listens on it.
func (d *device) newControl(o control.Options, id identity) (*control.Server, error) {
	var srv *control.Server
	o.Prober, o.Clock, o.Version = d.prober, d.clock, version
	o.Status = func(context.Context) any { return d.status(id, srv.Sampling()) }
	srv, err := control.NewServer(o)
	if err != nil {
		return nil, err
	}
	return srv, srv.Listen()
}

func (d *device) status(id identity, sampling control.Sampling) *status {
	s := &status{NodeID: id.NodeID(), Name: id.name, Version: version, UptimeS: int64(time.Since(id.start).Seconds()),
		Link:     linkStatus{State: link.StateDisabled, Relay: id.relay, SinceMS: id.start.UnixMilli()},
		Storage:  storageStatus{State: "off", Path: id.stateDir},
		Sampling: samplingStatus{Sampling: sampling}}
	if d.client != nil {
		l := d.client.Status()
		s.Link.State, s.Link.SinceMS = l.State, l.Since.UnixMilli()
		s.CloneSuspected, s.Drops = l.CloneSuspected, l.Drops
		if l.LastErr != "" {
			s.Link.LastError = &linkError{Code: l.LastCode, Message: l.LastErr, AtMS: l.LastErrAt.UnixMilli()}
		}
	}
	s.Clock.State, s.Clock.OffsetMS = d.clock.State()
	sample, err := d.prober.Latest()
	if err != nil {
		s.Sampling.LastError = err.Error()
	} else {
		s.Sample = &frame{NodeID: s.NodeID, Sample: sample}
	}
	return s
}

// dialSocket connects to the daemon; its errors carry the exit code and the next step.
func dialSocket(ctx context.Context, path string) (*control.Client, error) {
	c, err := control.Dial(ctx, path)
	if err != nil {
		return nil, socketError(err)
	}
	return c, nil
}

func newStatus() *cobra.Command {
	var out output
	var socket string
	c := &cobra.Command{
		Use:     "status",
		Short:   "What the daemon on this box knows: identity, link, clock, sampling",
		Example: "  agentctl status\n  agentctl status -o json | jq .link.state",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := dialSocket(cmd.Context(), socket)
			if err != nil {
				return err
			}
			defer func() { _ = cl.Close() }()
			var s status
			if err := cl.Status(cmd.Context(), &s); err != nil {
				return socketError(err)
			}
			return out.print(cmd, s, func() error { return printStatus(cmd.OutOrStdout(), &s) })
		},
	}
	out.flags(c)
	c.Flags().StringVar(&socket, "socket", env("AGENTCTL_SOCKET", clientSocket()), "`PATH` of the control socket [AGENTCTL_SOCKET]")
	return c
}

func printStatus(w io.Writer, s *status) error {
	row := func(k, format string, args ...any) { fmt.Fprintf(w, "%-9s %s\n", k, fmt.Sprintf(format, args...)) }
	name := s.NodeID
	if s.Name != "" {
		name = s.Name + " (" + s.NodeID + ")"
	}
	row("Node", "%s", name)
	row("Version", "%s, up %s", s.Version, (time.Duration(s.UptimeS) * time.Second).String())
	switch s.Link.State {
	case link.StateDisabled:
		row("Link", "no relay configured; add one with: agentctl run --relay URL --token-file FILE")
	case link.StateReady:
		row("Link", "ready, %s, since %s", s.Link.Relay, ago(s.Link.SinceMS))
	default:
		row("Link", "%s, %s, since %s", s.Link.State, s.Link.Relay, ago(s.Link.SinceMS))
	}
	if e := s.Link.LastError; e != nil && s.Link.State != link.StateReady {
		row("", "last error: %s", e.Message)
		row("", "%s", linkHint(link.Status{State: s.Link.State, LastCode: e.Code, CloneSuspected: s.CloneSuspected}))
	}
	row("Clock", "%s, %d ms off the relay's", s.Clock.State, s.Clock.OffsetMS)
	if s.Sample == nil {
		row("Sampling", "no sample yet: %s", s.Sampling.LastError)
		return nil
	}
	row("Sampling", "every %s", time.Duration(s.Sampling.IntervalMS)*time.Millisecond)
	m := s.Sample
	row("CPU", "%.1f %%   load %.2f %.2f %.2f", m.CPUPct, m.Load1, m.Load5, m.Load15)
	row("Memory", "%s of %s", bytesText(m.MemBytes), bytesText(m.MemTotalBytes))
	row("Disk", "%.1f %% used", m.DiskPct)
	return nil
}

// socketError gives an error of the control socket its exit code.
func socketError(err error) error {
	switch {
	case errors.Is(err, control.ErrNotRunning):
		return exit(exitNotRunning, "%w", err)
	case errors.Is(err, control.ErrPermission):
		return exit(exitUnauthorized, "%w", err)
	case errors.Is(err, context.DeadlineExceeded):
		return exit(exitTimeout, "%w", err)
	}
	return exit(exitFailure, "%w", err)
}
