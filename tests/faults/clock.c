/* Clocks that stand where a test wants them. Preloaded; in the environment:
 *   CLOCK_WALL   seconds since 1970 that the wall clock shows, all the time; may be negative
 *   CLOCK_TICK   seconds from one tick of the monotonic clock to the next; between them it stands
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t id, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, id, now);
    const char *wall = getenv("CLOCK_WALL"), *tick = getenv("CLOCK_TICK");
    if (failed) return failed;
    if (id == CLOCK_REALTIME && wall) {
        now->tv_sec = atoll(wall);
        now->tv_nsec = 0;
    } else if (id == CLOCK_MONOTONIC && tick) {
        now->tv_sec -= now->tv_sec % atoll(tick);
        now->tv_nsec = 0;
    }
    return 0;
}
