package handlers

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"strconv"
	"time"

	"agentctl/manifest"
	"agentctl/prober"
	"agentctl/prober/inspect"
)

// Machine is what Inspections uses of an *inspect.Machine. Each method returns when ctx ends at the
// latest, and names what is missing.
type Machine interface {
	Info(ctx context.Context) inspect.Info
	Processes(ctx context.Context, q inspect.ProcessQuery) inspect.Processes
	Disks(ctx context.Context, skip int) inspect.Disks
	Network(ctx context.Context, q inspect.NetworkQuery) inspect.Network
}

// Modules is what Inspections uses of a *prober.Prober.
type Modules interface {
	ReadModules(ctx context.Context, set prober.ModuleSet) (readings prober.ModuleReadings, unfinished prober.ModuleSet)
}

// InspectionOptions are what the handlers of Inspections read.
type InspectionOptions struct {
	Machine   Machine
	Modules   Modules
	Clock     Clock
	Arguments func() bool                             // whether processes may be shown with their command lines; nil: no
	Doctor    func(ctx context.Context) *DoctorReport // nil: no system.doctor
}

// DoctorReport is the result of the checks of package doctor, in the form of
// system.doctor.run.output@1.0.0.
type DoctorReport struct {
	Checks     []DoctorCheck `json:"checks"`
	Warnings   int           `json:"warnings"`
	Failures   int           `json:"failures"`
	Unfinished []string      `json:"unfinished,omitempty"` // names of checks that did not end in time
}

// DoctorCheck is what one check found.
type DoctorCheck struct {
	Name    string `json:"name"`
	Status  string `json:"status"` // ok, warn, fail or skip
	Message string `json:"message"`
	Next    string `json:"next,omitempty"`
}

// Inspections returns the handlers of system.info, system.modules, system.processes, system.disks,
// system.network and system.doctor.
func Inspections(o InspectionOptions) []Handler {
	list := []Handler{
		&inspection{manifest.Inspection(manifest.KindInfo), o.info},
		&inspection{manifest.Inspection(manifest.KindModules), o.modules},
		&inspection{manifest.Inspection(manifest.KindProcesses), o.processes},
		&inspection{manifest.Inspection(manifest.KindDisks), o.disks},
		&inspection{manifest.Inspection(manifest.KindNetwork), o.network},
	}
	if o.Doctor != nil {
		list = append(list, &inspection{manifest.Inspection(manifest.KindDoctor), o.doctor})
	}
	return list
}

// inspection is the handler of a capability with one verb.
type inspection struct {
	capability manifest.Capability
	// answer returns the result, to be encoded as JSON. Its ctx is pageContext of the call's.
	answer func(ctx context.Context, args []byte) (any, error)
}

// Capability implements Handler.
func (h *inspection) Capability() manifest.Capability { return h.capability }

// Call implements Handler.
func (h *inspection) Call(ctx context.Context, _ manifest.ToolName, args []byte) ([]byte, Stream, error) {
	timed, cancel := pageContext(ctx)
	defer cancel()
	out, err := h.answer(timed, args)
	if err != nil {
		return nil, nil, err
	}
	raw, err := encode(out)
	return raw, nil, err
}

// encode is json.Marshal without the escapes for HTML, which make <, > and & six times as long.
func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), err
}

// answerReserve is the part of maxPageSize for everything but the lists, in bytes.
const answerReserve = 2 << 10

// fit returns the first elements of a list, as many as fit into *free bytes of JSON, and reduces *free
// by their size. Each element is encoded twice, here and with the answer, which is cheap for the few
// hundred of a page.
func fit[T any](list []T, free *int) []T {
	for i := range list {
		raw, err := encode(&list[i])
		if err != nil || len(raw)+1 > *free {
			return list[:i]
		}
		*free -= len(raw) + 1
	}
	return list
}

// cursorInput is the input of disks and network. The cursor is the number of elements on the pages
// before; the schemas allow only digits.
type cursorInput struct {
	Cursor    string `json:"cursor"`
	Interface string `json:"interface"` // network only
}

// parseCursor decodes args. skip is the cursor, 0 without one.
func parseCursor(args []byte) (in cursorInput, skip int, err error) {
	if err := json.Unmarshal(args, &in); err != nil || in.Cursor == "" {
		return in, 0, err
	}
	skip, err = strconv.Atoi(in.Cursor)
	return in, skip, err
}

// checkCursor refuses a cursor beyond the end of the lists. The end itself is accepted: a list may have
// become shorter since the page before. While one of the lists is unfinished, total lacks what it has, and
// nothing is refused.
func checkCursor(skip, total int, unfinished []string, lists ...string) error {
	isUnread := func(list string) bool { return slices.Contains(unfinished, list) }
	if skip > total && !slices.ContainsFunc(lists, isUnread) {
		return manifest.E(manifest.ManifestInvalid, "argument cursor: not of a page with these arguments")
	}
	return nil
}

// nextCursor returns the cursor after a page of n elements; "" after the last page. A page without
// elements has none either: they could not be read, and the next call would not read them.
func nextCursor(skip, n, total int) string {
	if n == 0 || skip+n >= total {
		return ""
	}
	return strconv.Itoa(skip + n)
}

// info answers system.info.
func (o *InspectionOptions) info(ctx context.Context, _ []byte) (any, error) {
	return o.Machine.Info(ctx), nil
}

// modulesOutput is system.modules.read.output@1.0.0.
type modulesOutput struct {
	TSMS int64 `json:"ts_ms,omitempty"`
	prober.ModuleReadings
	Unavailable []string `json:"unavailable"` // the machine does not have them
	Unfinished  []string `json:"unfinished,omitempty"`
}

// modules answers system.modules. Modules that the sampler reads come from its newest sample, others
// are read now.
func (o *InspectionOptions) modules(ctx context.Context, args []byte) (any, error) {
	in := struct {
		Modules []string `json:"modules"`
	}{prober.OptionalModuleNames()}
	if err := json.Unmarshal(args, &in); err != nil {
		return nil, err
	}
	set := prober.ModuleSet(0)
	for _, name := range in.Modules {
		m, _ := prober.ModuleByName(name)
		set |= prober.SetOf(m)
	}
	readings, unfinished := o.Modules.ReadModules(ctx, set)
	out := modulesOutput{ModuleReadings: readings, Unavailable: []string{}}
	if ms, ok := o.Clock(); ok {
		out.TSMS = ms
	}
	// A module without a reading is not there, unless it was not read in time.
	present := readings.NewSince(&prober.ModuleReadings{})
	out.Unavailable = (set &^ present &^ unfinished).Names()
	if unfinished != 0 {
		out.Unfinished = unfinished.Names()
	}
	return out, nil
}

// processes answers system.processes. A list that does not fit is cut, and "details" is unfinished.
func (o *InspectionOptions) processes(ctx context.Context, args []byte) (any, error) {
	in := struct {
		SortBy   string `json:"sort_by"`
		Limit    int    `json:"limit"`
		WindowMS int64  `json:"window_ms"`
		Name     string `json:"name"`
	}{"cpu", 10, 500, ""}
	if err := json.Unmarshal(args, &in); err != nil {
		return nil, err
	}
	out := o.Machine.Processes(ctx, inspect.ProcessQuery{
		SortBy: in.SortBy, Limit: in.Limit, Window: time.Duration(in.WindowMS) * time.Millisecond, Name: in.Name,
		Args: o.Arguments != nil && o.Arguments(),
	})
	free := maxPageSize - answerReserve
	list := out.Processes
	if out.Processes = fit(list, &free); len(out.Processes) < len(list) && !slices.Contains(out.Unfinished, "details") {
		out.Unfinished = append(out.Unfinished, "details")
	}
	return out, nil
}

// disks answers system.disks. Pages are of file systems; drives are on the first one.
func (o *InspectionOptions) disks(ctx context.Context, args []byte) (any, error) {
	_, skip, err := parseCursor(args)
	if err != nil {
		return nil, err
	}
	d := o.Machine.Disks(ctx, skip)
	if err := checkCursor(skip, d.Total, d.Unfinished, "filesystems"); err != nil {
		return nil, err
	}
	free := maxPageSize - answerReserve
	d.Disks = fit(d.Disks, &free)
	d.Filesystems = fit(d.Filesystems, &free)
	return struct {
		inspect.Disks
		NextCursor string `json:"next_cursor,omitempty"`
	}{d, nextCursor(skip, len(d.Filesystems), d.Total)}, nil
}

// network answers system.network. Pages go through the interfaces, then through the routes.
func (o *InspectionOptions) network(ctx context.Context, args []byte) (any, error) {
	in, skip, err := parseCursor(args)
	if err != nil {
		return nil, err
	}
	n := o.Machine.Network(ctx, inspect.NetworkQuery{Interface: in.Interface, Skip: skip})
	total := n.TotalInterfaces + n.TotalRoutes
	if err := checkCursor(skip, total, n.Unfinished, "interfaces", "routes"); err != nil {
		return nil, err
	}
	free := maxPageSize - answerReserve
	interfaces := n.Interfaces
	if n.Interfaces = fit(interfaces, &free); len(n.Interfaces) < len(interfaces) {
		n.Routes = n.Routes[:0] // routes follow the last interface
	}
	n.Routes = fit(n.Routes, &free)
	return struct {
		inspect.Network
		NextCursor string `json:"next_cursor,omitempty"`
	}{n, nextCursor(skip, len(n.Interfaces)+len(n.Routes), total)}, nil
}

// Bounds of the schema of system.doctor; texts in characters.
const (
	maxChecks    = 32
	maxCheckName = 32
	maxCheckText = 512
)

// doctor answers system.doctor. Messages of checks may quote files of the board, so they are cleaned.
func (o *InspectionOptions) doctor(ctx context.Context, _ []byte) (any, error) {
	r := o.Doctor(ctx)
	out := DoctorReport{Checks: []DoctorCheck{}, Warnings: r.Warnings, Failures: r.Failures}
	for _, c := range r.Checks[:min(len(r.Checks), maxChecks)] {
		out.Checks = append(out.Checks, DoctorCheck{
			inspect.Text(c.Name, maxCheckName), c.Status, inspect.Text(c.Message, maxCheckText), inspect.Text(c.Next, maxCheckText),
		})
	}
	for _, name := range r.Unfinished[:min(len(r.Unfinished), maxChecks)] {
		out.Unfinished = append(out.Unfinished, inspect.Text(name, maxCheckName))
	}
	free := maxPageSize - answerReserve
	out.Checks = fit(out.Checks, &free)
	return out, nil
}
