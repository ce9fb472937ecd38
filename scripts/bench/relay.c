/* Networks joined by long links, in user space: a star of TUN devices, one in a network namespace each.
 *
 *     namespace 0: far0 10.77.0.1 ──┐                       ┌── namespace 2: far0 10.77.2.1
 *                                   ├── this process, which ┤
 *     namespace 1: far0 10.77.1.1 ──┘   holds packets back  └── namespace 3: far0 10.77.3.1
 *
 * Usage: relay COUNT. It makes the namespaces, says a line "PID FD FD …" (each is /proc/PID/fd/FD, for setns), and
 * then obeys lines of standard input until that ends, and with it every namespace that no other process is in:
 *
 *     link DELAY_US BITS_PER_S QUEUE_BYTES   all links from now on: one-way delay, rate (0: none), longest queue
 *     count                                  answers "FROM TO PACKETS BYTES DROPPED" of each pair, then "."
 *
 * Each ordered pair of namespaces is a link of its own. A packet waits until those before it have been sent, takes
 * its bytes / rate to be sent, and arrives the delay later. One that finds the queue full is dropped, as a router
 * does; none overtakes another. Bytes are those of IP packets, with their heads.
 *
 * What TCP sends at once comes as one run of segments of up to MTU bytes, as network cards take it, and goes on as one
 * (a run for a link of 140 Mbit/s is some 17 KB): packet by packet, a core would carry some 500 Mbit/s and be the
 * narrowest link. A run arrives when its last segment does.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 64, MTU = 1500, BURST = 16, LONGEST = sizeof(struct virtio_net_hdr) + 65536 };

typedef struct Packet {
    struct Packet *next;
    int64_t arrives; /* ns */
    int length;   /* of what follows: the kernel's head of a run of segments, and then the run */
    int segments; /* IP packets on a link */
    int carried;  /* bytes of all of them */
    unsigned char bytes[];
} Packet;

typedef struct {
    Packet *first, *last;
    int64_t free_at; /* when all that was sent so far has left */
    uint64_t packets, bytes, dropped;
} Link;

static int count, tun[MOST];
static Link links[MOST][MOST];
static int64_t delay_ns, queue_bytes = 4 << 20;
static double ns_per_byte;

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void set_up(int asked, const char *name) {
    struct ifreq request = {0};
    strcpy(request.ifr_name, name);
    if (ioctl(asked, SIOCGIFFLAGS, &request)) fail("the flags of a device");
    request.ifr_flags |= IFF_UP;
    if (ioctl(asked, SIOCSIFFLAGS, &request)) fail("a device cannot be switched on");
}

/* Goes into a new namespace, and makes its device there. */
static int make(int number) {
    struct ifreq request = {0};
    struct sockaddr_in *address = (struct sockaddr_in *)&request.ifr_addr;
    if (unshare(CLONE_NEWNET)) fail("a network namespace cannot be made");
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (device < 0) fail("/dev/net/tun");
    strcpy(request.ifr_name, "far0");
    request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
    if (ioctl(device, TUNSETIFF, &request)) fail("a TUN device cannot be made");
    if (ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)) fail("runs of segments cannot be asked for");
    int asked = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    address->sin_family = AF_INET;
    address->sin_addr.s_addr = htonl(10u << 24 | 77u << 16 | (unsigned)number << 8 | 1u);
    if (ioctl(asked, SIOCSIFADDR, &request)) fail("an address cannot be set");
    address->sin_addr.s_addr = htonl(0xffff0000u);
    if (ioctl(asked, SIOCSIFNETMASK, &request)) fail("a network mask cannot be set");
    request.ifr_mtu = MTU;
    if (ioctl(asked, SIOCSIFMTU, &request)) fail("an MTU cannot be set");
    request.ifr_qlen = 10000; /* what the sender's TCP hands over at once must not be lost before the link */
    if (ioctl(asked, SIOCSIFTXQLEN, &request)) fail("a queue's length cannot be set");
    set_up(asked, "far0");
    set_up(asked, "lo");
    close(asked);
    return device;
}

/* Takes what a namespace has sent; gives the number of runs. */
static int take(int from) {
    static unsigned char bytes[LONGEST];
    int taken = 0;
    for (; taken < BURST; taken++) {
        ssize_t length = read(tun[from], bytes, sizeof bytes);
        if (length < 0 && (errno == EAGAIN || errno == EINTR)) return taken;
        if (length < 0) fail("a TUN device cannot be read");
        struct virtio_net_hdr *head = (struct virtio_net_hdr *)bytes;
        unsigned char *ip = bytes + sizeof *head;
        int carried = length - sizeof *head, segments = 1;
        if (carried < 20 || ip[0] >> 4 != 4 || ip[16] != 10 || ip[17] != 77 || ip[18] >= count) continue;
        if (head->gso_type != VIRTIO_NET_HDR_GSO_NONE) {
            int heads = (ip[0] & 15) * 4, payload;
            heads += (ip[heads + 12] >> 4) * 4; /* TCP's */
            payload = carried - heads;
            segments = (payload + head->gso_size - 1) / head->gso_size;
            carried += (segments - 1) * heads;
        }
        Link *link = &links[from][ip[18]];
        int64_t now = now_ns(); /* after it was read: what delays this process never makes a link shorter */
        int64_t begins = link->free_at > now ? link->free_at : now;
        if (ns_per_byte > 0 && (begins - now) / ns_per_byte + carried > queue_bytes) {
            link->dropped += segments;
            continue;
        }
        Packet *packet = malloc(sizeof *packet + length);
        if (!packet) fail("no memory");
        memcpy(packet->bytes, bytes, length);
        link->free_at = begins + (int64_t)(carried * ns_per_byte);
        packet->next = NULL;
        packet->length = length;
        packet->segments = segments;
        packet->carried = carried;
        packet->arrives = link->free_at + delay_ns;
        if (link->last && packet->arrives < link->last->arrives) packet->arrives = link->last->arrives;
        if (link->last) link->last->next = packet; else link->first = packet;
        link->last = packet;
    }
    return taken;
}

/* Hands over what has arrived on all links to a namespace; gives when the next packet arrives. */
static int64_t hand_over(int to, int64_t now) {
    int64_t next = INT64_MAX;
    for (int from = 0; from < count; from++) {
        Link *link = &links[from][to];
        Packet *packet;
        while ((packet = link->first) && packet->arrives <= now) {
            if (write(tun[to], packet->bytes, packet->length) == packet->length) {
                link->packets += packet->segments;
                link->bytes += packet->carried;
            } else {
                link->dropped += packet->segments;
            }
            link->first = packet->next;
            if (!link->first) link->last = NULL;
            free(packet);
        }
        if (packet && packet->arrives < next) next = packet->arrives;
    }
    return next;
}

/* Obeys the lines that have come; 0 when there will be none. */
static int obey(void) {
    static char line[256];
    static size_t filled;
    ssize_t length = read(0, line + filled, sizeof line - 1 - filled);
    if (length <= 0) return 0;
    filled += length;
    line[filled] = 0;
    char *end;
    while ((end = strchr(line, '\n'))) {
        long long delay_us, queue;
        double rate;
        *end = 0;
        if (sscanf(line, "link %lld %lf %lld", &delay_us, &rate, &queue) == 3) {
            delay_ns = delay_us * 1000;
            ns_per_byte = rate > 0 ? 8e9 / rate : 0;
            queue_bytes = queue;
            for (int from = 0; from < count; from++)
                for (int to = 0; to < count; to++) links[from][to].free_at = 0;
            puts(".");
        } else if (!strcmp(line, "count")) {
            for (int from = 0; from < count; from++)
                for (int to = 0; to < count; to++) {
                    Link *link = &links[from][to];
                    if (link->packets || link->dropped)
                        printf("%d %d %llu %llu %llu\n", from, to, (unsigned long long)link->packets,
                               (unsigned long long)link->bytes, (unsigned long long)link->dropped);
                }
            puts(".");
        } else {
            puts("?");
        }
        fflush(stdout);
        filled -= end + 1 - line;
        memmove(line, end + 1, filled + 1);
    }
    return filled < sizeof line - 1;
}

int main(int arguments, char **argument) {
    int spaces[MOST];
    count = arguments == 2 ? atoi(argument[1]) : 0;
    if (count < 2 || count > MOST) {
        fprintf(stderr, "usage: relay COUNT, from 2 to %d\n", MOST);
        return 2;
    }
    for (int number = 0; number < count; number++) {
        tun[number] = make(number);
        spaces[number] = open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
        if (spaces[number] < 0) fail("the namespace cannot be kept");
    }
    printf("%d", getpid());
    for (int number = 0; number < count; number++) printf(" %d", spaces[number]);
    puts("");
    fflush(stdout);
    prctl(PR_SET_TIMERSLACK, 1);
    setpriority(PRIO_PROCESS, 0, -15); /* a link does not wait for computers; where that may not be, it does */
    struct pollfd polled[MOST + 1];
    for (int number = 0; number < count; number++) polled[number] = (struct pollfd){tun[number], POLLIN, 0};
    polled[count] = (struct pollfd){0, POLLIN, 0};
    for (int busy = 0;;) {
        int64_t now = now_ns(), next = INT64_MAX;
        for (int to = 0; to < count; to++) {
            int64_t other = hand_over(to, now);
            if (other < next) next = other;
        }
        int64_t left = next == INT64_MAX ? -1 : next - now_ns();
        if (next != INT64_MAX && left < 0) left = 0;
        if (busy) left = 0;
        struct timespec wait = {left / 1000000000, left % 1000000000};
        if (ppoll(polled, count + 1, left < 0 ? NULL : &wait, NULL) < 0 && errno != EINTR) fail("poll");
        busy = 0;
        for (int from = 0; from < count; from++)
            if (polled[from].revents & POLLIN) busy |= take(from) == BURST;
        if (polled[count].revents && !obey()) return 0;
    }
}
