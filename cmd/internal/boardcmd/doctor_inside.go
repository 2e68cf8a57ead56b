//go:build linux

package boardcmd

import (
	"context"

	"agentctl/daemon"
	"agentctl/doctor"
	"agentctl/handlers"
)

// InsideDoctor returns the checks of package doctor for a daemon of this process, which cannot import them
// itself: they read its status.
//
// A daemon has one doctor.Inside for its whole life: it counts the checks that hang on a disk, and bounds
// the goroutines that they hold. The findings are copied into the types of package handlers, which define
// what an agent gets over the link; unfinished are the checks that did not end in time.
func InsideDoctor() daemon.DoctorFunc {
	inside := new(doctor.Inside)
	return func(ctx context.Context, e *daemon.Examination) *handlers.DoctorReport {
		r, unfinished := inside.Examine(ctx, e.Build.Version, e.Build.Time, e.Config, e.Status, e.Readings)
		out := &handlers.DoctorReport{Warnings: r.Warnings, Failures: r.Failures, Unfinished: unfinished}
		for _, f := range r.Checks {
			out.Checks = append(out.Checks, handlers.DoctorCheck{Name: f.Name, Status: string(f.Status), Message: f.Message, Next: f.Next})
		}
		return out
	}
}
