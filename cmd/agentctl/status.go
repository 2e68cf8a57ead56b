package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"agentctl/config"
	"agentctl/control"
	"agentctl/prober"
	"agentctl/prober/alert"
	"agentctl/term"
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
	Sample         *statusSample  `json:"sample"`
	CloneSuspected bool           `json:"clone_suspected"`
	Drops          uint64         `json:"drops"`
	Config         *configStatus  `json:"config,omitempty"`
	Alerts         []alert.Event  `json:"alerts,omitempty"` // raised and not cleared
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
	State  string `json:"state"` // off, ok, or degraded:storage: then what is new is in memory only
	Detail string `json:"detail,omitempty"`
	Path   string `json:"path"`
	Bytes  int64  `json:"bytes"` // of the history

	WrittenTodayBytes int64  `json:"written_today_bytes"` // since 0:00 UTC
	Rows              int64  `json:"rows"`
	Unsaved           int    `json:"unsaved"` // samples in memory only
	LastFlushMS       int64  `json:"last_flush_ms"`
	Dropped           uint64 `json:"dropped"`
}

type samplingStatus struct {
	control.Sampling
	LastError    string               `json:"last_error,omitempty"` // why there is no sample
	DiskError    string               `json:"disk_error,omitempty"` // why it is without the disk
	ModuleStates []prober.ModuleState `json:"module_states,omitempty"`
}

type configStatus struct {
	Files         []string `json:"files"`
	Error         string   `json:"error,omitempty"` // why the files are not in force
	RestartNeeded []string `json:"restart_needed,omitempty"`
}

// frame is a sample with the nine fields of RFC-0009 §5.1.
type frame struct {
	NodeID string `json:"node_id"`
	prober.Sample
}

// statusSample is a frame whose disk may be missing.
type statusSample struct {
	frame
	DiskPct *float64 `json:"disk_pct"` // null: not known, see sampling.disk_error
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
	if o.Status == nil {
		o.Status = func(context.Context) any { return d.status(id, srv.Sampling()) }
	}
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
		Sampling: samplingStatus{Sampling: sampling, ModuleStates: d.prober.ModuleStates()}}
	if client := d.link(); client != nil {
		l := client.Status()
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
		s.Sample = &statusSample{frame{s.NodeID, sample}, &sample.DiskPct}
		if sample.DiskErr != nil {
			s.Sample.DiskPct, s.Sampling.DiskError = nil, sample.DiskErr.Error()
		}
	}
	return s
}

// status is the device's, with what the daemon joins to it.
func (b *box) status() *status {
	c := b.config()
	s := b.dev.status(identity{b.id, c.Text("name"), c.Text("relay"), c.Text("state_dir"), b.start}, b.srv.Sampling())
	v := b.view()
	s.Alerts = b.alerts.Active()
	s.Config = &configStatus{Files: v.Files, Error: v.Error, RestartNeeded: v.Restart}
	if b.store == nil {
		return s
	}
	h := b.store.Stats()
	s.Storage = storageStatus{State: "ok", Path: h.Path, Bytes: h.Bytes, WrittenTodayBytes: h.WrittenToday, Rows: h.Rows,
		Unsaved: h.Unsaved, LastFlushMS: h.LastFlushMS, Dropped: h.Dropped}
	switch {
	case !b.recording.Load():
		s.Storage.State = "off"
	case h.State != "ok":
		s.Storage.State = "degraded:storage"
		s.Storage.Detail = strings.TrimPrefix(h.State, "degraded:")
		if h.LastError != "" {
			s.Storage.Detail += ": " + h.LastError
		}
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
	c.Flags().StringVar(&socket, "socket", env("AGENTCTL_SOCKET", config.ClientSocket()), "`PATH` of the control socket [AGENTCTL_SOCKET]")
	return c
}

func printStatus(w io.Writer, s *status) error {
	const indent = 10
	width, _, terminal := term.Size(w)
	row := func(k, format string, args ...any) {
		text := fmt.Sprintf(format, args...)
		lines := []string{text} // scripts get one line each
		if terminal && indent+utf8.RuneCountInString(text) > width {
			lines = term.Wrap(text, max(width-indent, 1))
		}
		for _, l := range lines {
			fmt.Fprintf(w, "%-*s%s\n", indent, k, l)
			k = ""
		}
	}
	name := s.NodeID
	if s.Name != "" {
		name = s.Name + " (" + s.NodeID + ")"
	}
	row("Node", "%s", name)
	row("Version", "%s, up %s", s.Version, (time.Duration(s.UptimeS) * time.Second).String())
	switch s.Link.State {
	case link.StateDisabled:
		row("Link", "none: this board works alone; for a relay: agentctl config set token_file FILE, then agentctl config set relay URL")
	case link.StateReady:
		row("Link", "ready, %s, since %s", s.Link.Relay, term.Ago(s.Link.SinceMS))
	default:
		row("Link", "%s, %s, since %s", s.Link.State, s.Link.Relay, term.Ago(s.Link.SinceMS))
	}
	if e := s.Link.LastError; e != nil && s.Link.State != link.StateReady {
		row("", "last error: %s", e.Message)
		row("", "%s", linkHint(link.Status{State: s.Link.State, LastCode: e.Code, LastErr: e.Message, CloneSuspected: s.CloneSuspected}))
	}
	row("Clock", "%s", clockText(s))
	printStorage(row, &s.Storage)
	if c := s.Config; c != nil && c.Error != "" {
		row("Config", "the files are wrong, the settings before are in force; see: agentctl config validate")
	} else if c != nil && len(c.RestartNeeded) > 0 {
		row("Config", "changed, and waits for a restart: %s", strings.Join(c.RestartNeeded, ", "))
	}
	if s.Sample == nil {
		row("Sampling", "no sample yet: %s", s.Sampling.LastError)
		return nil
	}
	each := (time.Duration(s.Sampling.IntervalMS) * time.Millisecond).String()
	if s.Sampling.Running {
		row("Sampling", "every %s; pushed to local clients: %s", each, strings.Join(s.Sampling.Modules, ", "))
	} else {
		row("Sampling", "every %s; push and recording are stopped, go on with: agentctl start", each)
	}
	m := s.Sample
	row("CPU", "%.1f %%   load %.2f %.2f %.2f", m.CPUPct, m.Load1, m.Load5, m.Load15)
	row("Memory", "%s of %s", term.Bytes(m.MemBytes), term.Bytes(m.MemTotalBytes))
	if m.DiskPct != nil {
		row("Disk", "%.1f %% used", *m.DiskPct)
	} else {
		row("Disk", "%s", s.Sampling.DiskError)
	}
	for _, a := range s.Alerts {
		row("Alert", "%s: %s (%s)", a.Level, a.Message, term.Ago(a.TS))
	}
	return nil
}

// clockText tells whether the time is to be trusted, and against what it was held.
func clockText(s *status) string {
	switch {
	case s.Clock.State == clock.Unsynced:
		return "not set yet; samples are kept and get their time when it is known"
	case s.Link.State == link.StateDisabled:
		return "this machine's own"
	}
	return fmt.Sprintf("%s, %d ms off the relay's", s.Clock.State, s.Clock.OffsetMS)
}

func printStorage(row func(k, format string, args ...any), s *storageStatus) {
	switch s.State {
	case "off":
		row("History", "off; turn it on with: agentctl config set history.enabled true")
	case "ok":
		if s.Bytes == 0 { // the file is opened with the first write
			row("History", "%d samples in memory, the first write is to come", s.Unsaved)
			break
		}
		row("History", "%d samples in %s, %s written today", s.Rows+int64(s.Unsaved), term.Bytes(uint64(s.Bytes)), term.Bytes(uint64(s.WrittenTodayBytes)))
	default:
		row("History", "%s, in memory only: %s", s.State, s.Detail)
		row("", "free or mend the disk of %s; recording goes on by itself then", s.Path)
	}
}
